// The table of prompts: filtered by kind and text, sorted, in pages; the mean reward over visits as a small line.
"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const PAGE = 20;
  const ORDERS = {
    "hardest first": (a, b) => a.mean - b.mean,
    "easiest first": (a, b) => b.mean - a.mean,
    "most gained first": (a, b) => gain(b) - gain(a),
    "most visits first": (a, b) => b.visits - a.visits,
  };
  const gain = (row) => row.trend[row.trend.length - 1][1] - row.trend[0][1];

  const element = (name, className, text) => {
    const made = document.createElement(name);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };

  const choice = (title, names) => {
    const label = element("label", "", title);
    const select = element("select");
    names.forEach((name) => select.append(element("option", "", name)));
    label.append(select);
    return [label, select];
  };

  const trend = (row, low, high) => {
    const svg = document.createElementNS(SVG, "svg");
    const first = row.trend[0][0];
    const span = row.trend[row.trend.length - 1][0] - first || 1;
    const y = (value) => 20 - (16 * (value - low)) / (high - low || 1);
    const points = row.trend.map(([step, value]) => `${3 + (94 * (step - first)) / span} ${y(value)}`);
    svg.setAttribute("class", "trend");
    svg.setAttribute("viewBox", "0 0 100 24");
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", row.trend.map(([step, value]) => `step ${step}: ${value}`).join(", "));
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("d", `M${points.join("L")}`);
    svg.append(path);
    return svg;
  };

  document.querySelectorAll(".prompt-browser").forEach((browser) => {
    const data = JSON.parse(browser.nextElementSibling.textContent);
    const values = data.rows.flatMap((row) => row.trend.map(([, value]) => value));
    const [low, high] = [values, values].map((list, i) => list.reduce((a, b) => (i ? Math.max : Math.min)(a, b)));
    let page = 0;

    const controls = element("div", "controls");
    const [kindLabel, kind] = choice("Kind", ["all", ...Object.keys(data.counts)]);
    const [orderLabel, order] = choice("Order", Object.keys(ORDERS));
    const textLabel = element("label", "", "Prompt contains");
    const text = element("input");
    text.type = "search";
    textLabel.append(text);
    controls.append(kindLabel, orderLabel, textLabel);

    const table = element("table");
    const head = table.createTHead().insertRow();
    ["prompt", "kind", "visits", "mean reward", "over its visits"].forEach((name, i) => {
      const cell = element("th", i === 2 || i === 3 ? "number" : "", name);
      cell.scope = "col";
      head.append(cell);
    });
    const body = table.createTBody();
    const wide = element("div", "wide");
    wide.append(table);
    const pages = element("div", "pages");
    const [back, where, next] = [element("button", "", "Previous"), element("span"), element("button", "", "Next")];
    where.setAttribute("role", "status");
    [back, next].forEach((button) => { button.type = "button"; });
    pages.append(back, where, next);
    browser.replaceChildren(controls, wide, pages);

    const show = () => {
      const wanted = text.value.toLowerCase();
      const found = data.rows
        .filter((row) => (kind.value === "all" || row.kind === kind.value) && row.prompt.toLowerCase().includes(wanted))
        .sort(ORDERS[order.value]);
      page = Math.max(0, Math.min(page, Math.ceil(found.length / PAGE) - 1));
      body.replaceChildren();
      found.slice(page * PAGE, (page + 1) * PAGE).forEach((row) => {
        const line = body.insertRow();
        line.append(element("td", "text", row.prompt), element("td", `kind ${row.kind}`, row.kind));
        line.append(element("td", "number", String(row.visits)), element("td", "number", String(row.mean)));
        const last = line.insertCell();
        if (row.trend.length > 1) last.append(trend(row, low, high));
      });
      const of = data.rows.length < data.total ? ` (of ${data.total.toLocaleString("en")} prompts, those visited most)` : "";
      const end = Math.min(found.length, (page + 1) * PAGE);
      where.textContent = found.length
        ? `${(page * PAGE + 1).toLocaleString("en")}–${end.toLocaleString("en")} of ${found.length.toLocaleString("en")}${of}`
        : "No prompt matches.";
      back.disabled = page === 0;
      next.disabled = (page + 1) * PAGE >= found.length;
    };

    const again = () => { page = 0; show(); };
    [kind, order].forEach((select) => select.addEventListener("change", again));
    text.addEventListener("input", again);
    back.addEventListener("click", () => { page -= 1; show(); });
    next.addEventListener("click", () => { page += 1; show(); });
    show();
  });
})();

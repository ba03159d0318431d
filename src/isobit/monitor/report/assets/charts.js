// Values of a chart under the pointer, or by the arrow keys: a line at the nearest step, and the value of each series.
"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";

  const place = (axis, value) => {
    if (axis.log && value <= 0) return axis.zero;
    const [v, low, high] = axis.log ? [value, axis.low, axis.high].map(Math.log10) : [value, axis.low, axis.high];
    return axis.start + ((v - low) / (high - low)) * (axis.end - axis.start);
  };

  const nearest = (sorted, value) => {
    let best = 0;
    sorted.forEach((v, i) => { if (Math.abs(v - value) < Math.abs(sorted[best] - value)) best = i; });
    return best;
  };

  const number = (value) => {
    if (value === 0) return "0";
    const size = Math.abs(value);
    return size >= 1e5 || size < 1e-4 ? value.toExponential(2) : String(+value.toPrecision(4));
  };

  const attach = (figure) => {
    const data = JSON.parse(figure.querySelector("script[type='application/json']").textContent);
    const svg = figure.querySelector("svg");
    const steps = [...new Set(data.lines.flatMap((line) => line.x))].sort((a, b) => a - b);
    const box = document.createElement("div");
    box.className = "values";
    box.hidden = true;
    box.setAttribute("role", "status");
    figure.append(box);
    svg.setAttribute("tabindex", "0");
    const cursor = document.createElementNS(SVG, "g");
    svg.append(cursor);
    let at = -1;

    const draw = (element, attributes) => {
      const made = document.createElementNS(SVG, element);
      Object.entries(attributes).forEach(([name, value]) => made.setAttribute(name, value));
      cursor.append(made);
    };

    const row = (name, value, color) => {
      const line = document.createElement("div");
      const [left, right] = [document.createElement("span"), document.createElement("b")];
      left.textContent = name;
      right.textContent = value;
      if (color !== undefined) left.className = `legend-key c${color}`;
      line.append(left, right);
      box.append(line);
    };

    const hide = () => { at = -1; box.hidden = true; cursor.replaceChildren(); };

    const show = (index) => {
      at = Math.max(0, Math.min(steps.length - 1, index));
      const step = steps[at];
      const x = place(data.x, step);
      cursor.replaceChildren();
      box.replaceChildren();
      draw("path", { class: "cursor", d: `M${x} 10V178` });
      row(data.axis, String(step));
      data.lines.forEach((line) => {
        const i = line.x.indexOf(step);
        if (i < 0) return;
        row(line.name, number(line.y[i]), line.color);
        if (data.y) draw("path", { class: `cursor-dots c${line.color}`, d: `M${x} ${place(data.y, line.y[i])}h0` });
      });
      box.hidden = false;
      const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
      const left = x * scale + 12;
      const over = left + box.offsetWidth > figure.clientWidth;
      box.style.left = `${Math.max(0, over ? x * scale - box.offsetWidth - 12 : left)}px`;
    };

    const follow = (event) => {
      const bounds = svg.getBoundingClientRect();
      const x = ((event.clientX - bounds.left) / bounds.width) * svg.viewBox.baseVal.width;
      const share = (x - data.x.start) / (data.x.end - data.x.start);
      const { low, high, log } = data.x;
      show(nearest(steps, log ? low * (high / low) ** share : low + share * (high - low)));
    };

    svg.addEventListener("pointermove", follow);
    svg.addEventListener("pointerdown", follow);
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: at < 0 ? steps.length - 1 : at - 1, ArrowRight: at + 1, Home: 0, End: steps.length - 1 };
      if (event.key === "Escape") hide();
      if (!(event.key in moves)) return;
      event.preventDefault();
      show(moves[event.key]);
    });
  };

  document.querySelectorAll("figure.chart").forEach(attach);
})();

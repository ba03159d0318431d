// The browser of completions: filters, order, pages, and tokens coloured by log-probability or by mismatch.
// Completions are untrusted text: they are inserted by textContent, and by nothing else.
"use strict";
(() => {
  const PAGE = 10;
  const SCALES = {
    "log-probability": {
      className: "by-logprob",
      shade: (logprob) => [-0.1, -0.7, -1.6, -3, -5].filter((limit) => logprob < limit).length,
      words: ["≥ 0.9", "≥ 0.5", "≥ 0.2", "≥ 0.05", "≥ 0.007", "below"],
    },
    mismatch: {
      className: "by-mismatch",
      shade: (difference) => [0, 1e-4, 1e-3, 1e-2, 1e-1].filter((limit) => difference > limit).length,
      words: ["0", "≤ 10⁻⁴", "≤ 10⁻³", "≤ 0.01", "≤ 0.1", "above"],
    },
  };
  const largest = (row) => (row.differences ? row.differences.reduce((a, b) => Math.max(a, b)) : row.differences === 0 ? 0 : -1);
  const rewardOf = (row) => (row.reward === null ? -Infinity : row.reward);
  const ORDERS = {
    step: (a, b) => a.step - b.step,
    "latest step": (a, b) => b.step - a.step,
    "highest reward": (a, b) => rewardOf(b) - rewardOf(a),
    "lowest reward": (a, b) => rewardOf(a) - rewardOf(b),
    "largest mismatch": (a, b) => largest(b) - largest(a),
    longest: (a, b) => b.length - a.length,
  };

  const element = (name, className, text) => {
    const made = document.createElement(name);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };

  const labelled = (title, input) => {
    const label = element("label", "", title);
    label.append(input);
    return label;
  };

  const field = (type, hint) => {
    const input = element("input");
    input.type = type;
    if (type === "number") input.step = "any";
    if (hint) input.placeholder = hint;
    return input;
  };

  const range = (title, low, high) => {
    const ends = [field("number", low), field("number", high)];
    const label = element("label", "", title);
    const pair = element("span", "pair");
    ends[0].setAttribute("aria-label", `${title} from`);
    ends[1].setAttribute("aria-label", `${title} to`);
    pair.append(ends[0], element("span", "", "–"), ends[1]);
    label.append(pair);
    const inside = (value) =>
      (ends[0].value === "" || (value !== null && value >= Number(ends[0].value))) &&
      (ends[1].value === "" || (value !== null && value <= Number(ends[1].value)));
    return { label, inside };
  };

  const short = (value) => (value === null ? "none" : String(+Number(value).toPrecision(4)));

  const attach = (browser, index) => {
    const data = JSON.parse(browser.nextElementSibling.textContent);
    const special = new Set(data.special);
    const textOf = (row) => (row.pieces ? row.pieces.map((i) => (special.has(i) ? "" : data.pieces[i])).join("") : row.text);
    data.rows.forEach((row) => { row.text = textOf(row); row.search = row.text.toLowerCase(); });
    const coloured = data.rows.some((row) => row.logprobs);
    const compared = data.rows.some((row) => row.differences !== undefined);
    let page = 0;
    let colour = coloured ? (data.rows.some((row) => row.differences) ? "mismatch" : "log-probability") : "none";

    const steps = data.rows.map((row) => row.step);
    const rewards = data.rows.map((row) => row.reward).filter((reward) => reward !== null).sort((a, b) => a - b);
    const controls = element("div", "controls");
    const step = range("Step", String(steps[0]), String(steps[steps.length - 1]));
    const reward = range("Reward", short(rewards[0] ?? null), short(rewards[rewards.length - 1] ?? null));
    const prompt = field("search");
    const text = field("search");
    const order = element("select");
    Object.keys(ORDERS).forEach((name) => order.append(element("option", "", name)));
    controls.append(step.label, reward.label, labelled("Prompt contains", prompt), labelled("Completion contains", text));
    controls.append(labelled("Order", order));

    const choices = element("fieldset");
    choices.append(element("legend", "", "Colour tokens by"));
    const scale = element("div", "scale");
    ["none", ...(coloured ? ["log-probability"] : []), ...(compared ? ["mismatch"] : [])].forEach((name) => {
      const radio = field("radio");
      radio.name = `colour-${index}`;
      radio.value = name;
      radio.checked = name === colour;
      radio.addEventListener("change", () => { colour = name; show(); });
      const label = element("label");
      label.append(radio, document.createTextNode(name));
      choices.append(label);
    });

    const list = element("div");
    const pages = element("div", "pages");
    const [back, where, next] = [element("button", "", "Previous"), element("span"), element("button", "", "Next")];
    where.setAttribute("role", "status");
    [back, next].forEach((button) => { button.type = "button"; });
    pages.append(back, where, next);
    const hint = coloured ? "Point at a token, or touch it, to read its numbers." : "The run has no tokenizer to show tokens with.";
    const readout = element("p", "readout", hint);
    readout.setAttribute("role", "status");
    browser.replaceChildren(controls, ...(data.recorded ? [choices, scale] : []), list, pages, ...(data.recorded ? [readout] : []));

    const shadeOf = (row, i) => {
      if (colour === "log-probability") return SCALES[colour].shade(row.logprobs[i]);
      if (colour === "mismatch" && row.differences) return SCALES[colour].shade(row.differences[i]);
      return 0;
    };

    const read = (span, row, i) => {
      list.querySelectorAll(".chosen").forEach((other) => other.classList.remove("chosen"));
      span.classList.add("chosen");
      const logprob = row.logprobs[i];
      const difference = row.differences === undefined ? "not compared" : row.differences === 0 ? 0 : row.differences[i];
      const name = JSON.stringify(data.pieces[row.pieces[i]]);
      readout.textContent = `token ${i + 1} ${name}: log p ${logprob.toFixed(3)} (p ${Math.exp(logprob).toPrecision(3)}), |learner − rollout| ${
        difference === 0 ? "0 exactly" : difference}`;
    };

    const tokens = (row) => {
      const line = element("pre", SCALES[colour]?.className ?? "");
      if (!row.pieces) {
        line.textContent = row.text;
        return line;
      }
      const given = new Set(row.given);
      row.pieces.forEach((piece, i) => {
        const shown = data.pieces[piece] === "" ? "·" : data.pieces[piece];
        const span = element("span", given.has(i) ? "given" : `token l${shadeOf(row, i)}${special.has(piece) ? " special" : ""}`, shown);
        if (!given.has(i)) span.dataset.token = i;
        line.append(span);
      });
      const cut = row.length - row.pieces.length;
      if (cut > 0) line.append(element("span", "soft", ` … and ${cut.toLocaleString("en")} more tokens`));
      const readHere = (event) => {
        const span = event.target.closest("[data-token]");
        if (span) read(span, row, Number(span.dataset.token));
      };
      line.addEventListener("pointerover", readHere);
      line.addEventListener("click", readHere);
      return line;
    };

    const article = (row, i, rows) => {
      const made = element("article");
      const before = rows[i - 1];
      const asked = !before || before.step !== row.step || before.prompt !== row.prompt;
      if (!asked) made.className = "again";
      const parts = [`step ${row.step}`, row.reward === null ? "not scored" : `reward ${short(row.reward)}`];
      if (row.rewards) parts.push(Object.entries(row.rewards).map(([name, value]) => `${name} ${short(value)}`).join(", "));
      if (row.episode) parts.push(row.episode);
      parts.push(`${row.length.toLocaleString("en")} tokens${row.truncated ? ", truncated" : ""}`);
      if (row.differences !== undefined) parts.push(`largest |Δ log p| ${largest(row) === 0 ? "0 exactly" : largest(row)}`);
      if (asked) made.append(element("pre", "prompt", data.prompts[row.prompt]));
      made.append(element("h4", "", parts.join(" · ")), tokens(row));
      return made;
    };

    const legend = () => {
      scale.replaceChildren();
      scale.className = `scale ${SCALES[colour]?.className ?? ""}`;
      if (colour === "none") return;
      scale.append(element("span", "", colour === "mismatch" ? "|learner − rollout|, nats:" : "probability:"));
      SCALES[colour].words.forEach((word, i) => scale.append(element("span", `token l${i}`, word)));
    };

    const show = () => {
      const [inPrompt, inText] = [prompt, text].map((input) => input.value.toLowerCase());
      const found = data.rows
        .filter((row) => step.inside(row.step) && reward.inside(row.reward) && row.search.includes(inText))
        .filter((row) => data.prompts[row.prompt].toLowerCase().includes(inPrompt))
        .sort(ORDERS[order.value]);
      page = Math.max(0, Math.min(page, Math.ceil(found.length / PAGE) - 1));
      list.replaceChildren(...found.slice(page * PAGE, (page + 1) * PAGE).map(article));
      const last = Math.min(found.length, (page + 1) * PAGE);
      where.textContent = found.length
        ? `${(page * PAGE + 1).toLocaleString("en")}–${last.toLocaleString("en")} of ${found.length.toLocaleString("en")} shown here`
        : "No completion matches.";
      back.disabled = page === 0;
      next.disabled = (page + 1) * PAGE >= found.length;
      legend();
    };

    const again = () => { page = 0; show(); };
    controls.querySelectorAll("input, select").forEach((input) => input.addEventListener("input", again));
    const turn = (by) => {
      page += by;
      show();
      browser.scrollIntoView({ block: "start" });
    };
    back.addEventListener("click", () => turn(-1));
    next.addEventListener("click", () => turn(1));
    show();
  };

  document.querySelectorAll(".completion-browser").forEach(attach);
})();

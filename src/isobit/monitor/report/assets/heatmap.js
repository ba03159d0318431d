// The heat maps' slider: cells of the chosen recorded step. Colours and texts as report/heatmap.py makes them.
"use strict";
(() => {
  const SHADES = 8;
  const SUPERSCRIPTS = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };

  const shade = (value, scale) => {
    if (value === null || (scale.log && value <= 0)) return 0;
    const [v, low, high] = (scale.log ? [value, scale.low, scale.high].map(Math.log10) : [value, scale.low, scale.high]);
    return 1 + Math.min(SHADES - 1, Math.max(0, Math.trunc((SHADES * (v - low)) / (high - low))));
  };

  const text = (value) => {
    if (value === null) return "–";
    if (value === 0) return "0";
    if (value >= 1e-3) return `${(100 * value).toFixed(2)}%`;
    const [mantissa, power] = value.toExponential(1).split("e");
    const exact = `10${[...String(+power)].map((c) => SUPERSCRIPTS[c]).join("")}`;
    return mantissa === "1.0" ? exact : `${+mantissa}·${exact}`;
  };

  document.querySelectorAll(".heat").forEach((heat) => {
    const data = JSON.parse(heat.nextElementSibling.textContent);
    const controls = heat.querySelector(".heat-controls");
    const slider = controls.querySelector("input");
    const output = controls.querySelector("output");

    const show = () => {
      const record = Number(slider.value);
      output.textContent = data.steps[record];
      slider.setAttribute("aria-valuetext", `step ${data.steps[record]}`);
      heat.querySelectorAll("table").forEach((table) => {
        const scale = data.figures[table.dataset.figure];
        [...table.tBodies[0].rows].forEach((row, layer) => {
          data.tensors.forEach((_, tensor) => {
            const value = scale.cells[record][tensor][layer] ?? null;
            const cell = row.cells[tensor + 1];
            cell.className = `q${shade(value, scale)}`;
            cell.textContent = text(value);
          });
        });
      });
    };

    slider.addEventListener("input", show);
    controls.hidden = data.steps.length < 2;
    show();
  });
})();

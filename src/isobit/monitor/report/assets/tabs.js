// The page's sections as tabs, each with an address of its own (#mismatch); arrow keys move between them.
"use strict";
(() => {
  const main = document.querySelector("main");
  const sections = [...main.querySelectorAll(":scope > section")];
  const list = document.createElement("div");
  list.setAttribute("role", "tablist");
  list.setAttribute("aria-label", "Parts of the report");

  const tabs = sections.map((section) => {
    const tab = document.createElement("button");
    tab.type = "button";
    tab.textContent = section.querySelector("h2").textContent;
    tab.id = `tab-${section.id}`;
    tab.setAttribute("role", "tab");
    tab.setAttribute("aria-controls", section.id);
    section.setAttribute("role", "tabpanel");
    section.setAttribute("aria-labelledby", tab.id);
    list.append(tab);
    return tab;
  });

  const select = (index) => {
    sections.forEach((section, i) => { section.hidden = i !== index; });
    tabs.forEach((tab, i) => {
      tab.setAttribute("aria-selected", String(i === index));
      tab.tabIndex = i === index ? 0 : -1;
    });
    const tab = tabs[index];
    list.scrollLeft = tab.offsetLeft - (list.clientWidth - tab.offsetWidth) / 2;
  };

  const open = (index) => {
    select(index);
    history.replaceState(null, "", `#${sections[index].id.slice("part-".length)}`);
    if (scrollY > main.offsetTop) scrollTo(0, main.offsetTop);
  };

  const fromAddress = () => Math.max(0, sections.findIndex((section) => section.id === `part-${location.hash.slice(1)}`));

  tabs.forEach((tab, i) => {
    tab.addEventListener("click", () => open(i));
    tab.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: i - 1, ArrowRight: i + 1, Home: 0, End: tabs.length - 1 };
      if (!(event.key in moves)) return;
      event.preventDefault();
      const to = (moves[event.key] + tabs.length) % tabs.length;
      open(to);
      tabs[to].focus();
    });
  });
  main.before(list);
  main.classList.add("tabbed");
  select(fromAddress());
  addEventListener("hashchange", () => select(fromAddress()));
})();

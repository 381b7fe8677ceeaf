"use strict";
(() => {
  const { config, colours, datasets, charts } = JSON.parse(document.getElementById("data").textContent);
  const state = { axis: "step", whole: false, hidden: new Set() };
  const views = new Map();

  const escape = (text) => {
    const node = document.createElement("span");
    node.textContent = text;
    return node.innerHTML;
  };

  // The series that have a value here, each with its colour.
  const describe = (values) => {
    const rows = Object.entries(values)
      .filter(([, value]) => !["", "NaN", "null", "undefined"].includes(String(value)))
      .map(([name, value]) => {
        const dot = name in colours ? `<span class="dot" style="background: ${colours[name]}"></span>` : "";
        return `<tr><td>${dot}${escape(name)}</td><td>${escape(value)}</td></tr>`;
      });
    return `<table>${rows.join("")}</table>`;
  };

  const chosen = (key) => {
    const spec = charts[key][state.axis];
    const names = new Set();
    const visit = (part) => {
      if (part.data?.name) names.add(part.data.name);
      (part.layer ?? []).forEach(visit);
    };
    visit(spec);
    return { ...spec, datasets: Object.fromEntries([...names].map((name) => [name, datasets[name]])) };
  };

  const draw = async (element) => {
    const key = element.dataset.chart;
    views.get(key)?.finalize();
    views.delete(key);
    const drawn = await vegaEmbed(element, chosen(key), {
      renderer: "svg",
      config,
      actions: { export: true, source: false, compiled: false, editor: false },
      downloadFileName: key,
      tooltip: { formatTooltip: describe, disableDefaultStyle: true },
    });
    views.set(key, drawn);
    await apply(drawn.view);
  };

  const apply = async (view) => {
    const signals = view.getState({ signals: (name) => name === "hidden" || name === "whole" }).signals;
    if ("hidden" in signals) view.signal("hidden", [...state.hidden]);
    if ("whole" in signals) view.signal("whole", state.whole);
    await view.runAsync();
  };

  const elements = [...document.querySelectorAll("[data-chart]")];
  const drawAll = () => Promise.all(elements.map(draw));
  const applyAll = () => Promise.all([...views.values()].map(({ view }) => apply(view)));

  document.getElementById("legend").addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    const label = button.dataset.series;
    const hide = !state.hidden.has(label);
    state.hidden[hide ? "add" : "delete"](label);
    button.setAttribute("aria-pressed", String(!hide));
    for (const figure of document.querySelectorAll("figure[data-series]")) {
      figure.hidden = state.hidden.has(figure.dataset.series);
    }
    applyAll();
  });
  document.getElementById("axis").addEventListener("change", (event) => {
    state.axis = event.target.value;
    drawAll();
  });
  document.getElementById("range").addEventListener("change", (event) => {
    state.whole = event.target.value === "whole";
    applyAll();
  });

  drawAll().then(() => {
    document.documentElement.dataset.drawn = String(views.size);
  });
})();

"use strict";
(() => {
  const { config, charts } = JSON.parse(document.getElementById("data").textContent);
  const draw = (element) => vegaEmbed(element, charts[element.dataset.chart], {
    renderer: "svg",
    config,
    actions: { export: true, source: false, compiled: false, editor: false },
    downloadFileName: element.dataset.chart,
    tooltip: { disableDefaultStyle: true },
  }).then(({ view }) => {
    // In a narrow chart the legend has more rows; a second layout makes room for them.
    const layOut = () => view.resize().runAsync();
    addEventListener("resize", layOut);
    return layOut();
  });
  const elements = [...document.querySelectorAll("[data-chart]")];
  Promise.all(elements.map(draw)).then(() => {
    document.documentElement.dataset.drawn = String(elements.length);
  });
})();

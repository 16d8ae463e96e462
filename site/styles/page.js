// The widget scripts look for their icon fonts on this site.
window.require = {
  paths: {
    "@jupyter-widgets/html-manager/dist": new URL(
      document.documentElement.dataset.content_root + "_static/widgets",
      document.baseURI,
    ).href,
  },
};

// Only what Sphinx marks as math is typeset. The widget scripts speak to MathJax 2:
// translate for MathJax 3.
window.MathJax = {
  options: { processHtmlClass: "tex2jax_process|mathjax_process|math|output_area" },
  Hub: { Queue() {} },
  startup: {
    ready() {
      MathJax.startup.defaultReady();
      MathJax.Hub = { Queue: ([, , element]) => MathJax.typesetPromise([element]) };
    },
  },
};

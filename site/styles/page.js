// The widget scripts, all in one file, look for their icon fonts beside it.
{
  const root = document.documentElement.dataset.content_root;
  const widgets = new URL(root + "_static/widgets", document.baseURI).href;
  window.require = {
    paths: {
      "@jupyter-widgets": widgets,
      "@jupyter-widgets/html-manager/dist": widgets,
    },
  };
}

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

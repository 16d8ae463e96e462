// Icon fonts of the widgets, from this site.
window.__jupyter_widgets_assets_path__ = new URL(
  document.documentElement.dataset.content_root + "_static/widgets/",
  document.baseURI,
).href;

// The widget scripts speak to MathJax 2: translate for MathJax 3.
window.MathJax = window.MathJax || {};
window.MathJax.Hub = { Queue() {} };
window.MathJax.startup = {
  ready() {
    MathJax.startup.defaultReady();
    MathJax.Hub = { Queue: ([, , element]) => MathJax.typesetPromise([element]) };
  },
};

// Only what Sphinx marks as math is typeset.
window.MathJax = {
  options: { processHtmlClass: "tex2jax_process|mathjax_process|math|output_area" },
};

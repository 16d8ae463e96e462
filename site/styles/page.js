// Only what Sphinx marks as math is typeset.
window.MathJax = {
  options: { processHtmlClass: "tex2jax_process|mathjax_process|math|output_area" },
};

// Paper is light, whatever the screen is.
{
  const page = document.documentElement;
  let onScreen;
  addEventListener("beforeprint", () => {
    onScreen = page.dataset.theme;
    page.dataset.theme = "light";
  });
  addEventListener("afterprint", () => {
    page.dataset.theme = onScreen;
  });
}

// A figure with sliders: each slider's step says how far it moves in the list of frames.
// The frames are fetched once the reader comes near the figure.
for (const figure of document.querySelectorAll(".explore")) {
  const frames = JSON.parse(figure.dataset.frames);
  const image = figure.querySelector("img");
  const sliders = [...figure.querySelectorAll("input")];
  const fetched = [];

  const show = () => {
    let index = 0;
    for (const slider of sliders) {
      const value = JSON.parse(slider.dataset.values)[slider.value];
      slider.setAttribute("aria-valuetext", value);
      slider.parentElement.querySelector("output").textContent = value;
      index += slider.value * slider.dataset.step;
    }
    [image.src, image.alt] = frames[index];
  };
  const fetchFrames = () => {
    if (fetched.length) return;
    for (const [source] of frames) {
      fetched.push(new Image());
      fetched.at(-1).src = source;
    }
  };
  for (const slider of sliders) slider.addEventListener("input", show);
  figure.addEventListener("focusin", fetchFrames);
  figure.addEventListener("pointerenter", fetchFrames);
  figure.dataset.live = "";
  show(); // a browser may restore the sliders of an earlier visit
}

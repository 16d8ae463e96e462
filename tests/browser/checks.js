// What the tests see in a page: each function is called by the test of that subject.
window.checks = {
  unsetMath: () => {
    const marked = [...document.querySelectorAll(".math")];
    const bad = marked.filter(e => e.querySelectorAll("mjx-container").length != 1
                                   || e.querySelector("mjx-merror"));
    const stray = document.querySelectorAll("mjx-container").length - marked.length;
    return [bad.map(e => e.textContent), stray];
  },

  rawMath: () => {
    const raw = /\\[([]|\\begin\{|\$\$|\$[^\s$][^$\n]*\$/;
    const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    const found = raw.test(document.title) ? [document.title] : [];
    while (walk.nextNode()) {
      const inside = walk.currentNode.parentElement;
      if (!inside.closest("pre, code, script, style, mjx-container, .sig")
          && raw.test(walk.currentNode.data)) found.push(walk.currentNode.data);
    }
    return found;
  },

  tooWide: () => document.documentElement.scrollWidth > document.documentElement.clientWidth
    ? [...document.querySelectorAll("body :not(pre *)")]
        .filter(e => e.getBoundingClientRect().right > innerWidth)
        .map(e => e.tagName + "." + e.className).slice(0, 5)
    : null,

  contrast: () => {
    const light = c => { const [r, g, b] = c.match(/[\d.]+/g).map(Number);
                         return (0.3 * r + 0.6 * g + 0.1 * b) / 255; };
    const style = getComputedStyle(document.body);
    return light(style.color) - light(style.backgroundColor);
  },

  // An empty alternative is right only where words stand beside the picture in its link.
  silentPictures: () => [...document.querySelectorAll("img, svg, [role=img]")].filter(e => {
    if (e.closest("[aria-hidden=true], mjx-container, svg svg, [role=img] svg"))
      return false;
    const words = [e.getAttribute("alt"), e.getAttribute("aria-label"),
                   e.querySelector(":scope > title")?.textContent];
    if (words.some(word => word?.trim())) return false;
    const control = e.closest("a, button, summary, label");
    return !(control?.textContent.trim() || control?.getAttribute("aria-label"));
  }).map(e => e.outerHTML.slice(0, 200)),

  seen: async e => {
    const image = e.querySelector("img");
    await image.decode();
    const said = [...e.querySelectorAll("output")].map(output => output.textContent);
    return [image.alt, image.src, ...said];
  },

  // Most nodes of a chapter are tokens of code and parts of formulas: axe-core sees each
  // kind of token once, which holds its colours, and formulas as text.
  cut: () => {
    const seen = new Set(), cut = [];
    for (const e of document.querySelectorAll(".highlight pre, mjx-container")) {
      const whole = document.createDocumentFragment();
      whole.append(...e.childNodes);
      cut.push([e, whole]);
      e.append(whole.textContent.slice(0, 20));
      for (const token of whole.querySelectorAll("span[class]")) {
        const kind = token.className + !!e.closest(".cell_output");
        if (!seen.has(kind)) e.append("\n", token.cloneNode(true));
        seen.add(kind);
      }
    }
    window.uncut = () => cut.forEach(([e, whole]) => e.replaceChildren(whole));
  },

  axe: async ([allowed, options]) => {
    const found = await axe.run(document, {resultTypes: ["violations"], ...options});
    const fault = ([rule, selector], v, n) =>
      rule == v.id && document.querySelector(n.target.join(" ")).matches(selector);
    return found.violations
      .filter(v => ["serious", "critical"].includes(v.impact))
      .flatMap(v => v.nodes.filter(n => !allowed.some(a => fault(a, v, n)))
                           .map(n => [v.id, n.target.join(" "), n.html.slice(0, 150)]));
  },

  // Every control that is seen and was not reached before: what it looks like without the focus is kept, and what
  // it looks like with it is noted each time that the focus comes.
  listen: () => {
    const controls = "a[href], button, input:not([type=hidden]), select, textarea, " +
                     "summary, audio[controls], video[controls], [tabindex]";
    const look = e => {
      const {outlineStyle, outlineWidth, outlineColor, boxShadow, borderColor,
             borderWidth, backgroundColor, textDecorationLine} = getComputedStyle(e);
      const outline = outlineStyle == "none" ? "" : outlineWidth + outlineColor;
      return [outline, boxShadow, borderColor, borderWidth, backgroundColor,
              textDecorationLine].join();
    };
    document.activeElement.blur();
    scrollTo(0, 0);
    // The way back to the top is there only while the reader scrolls up; arrow keys move
    // between the radio buttons of a group; on a phone more code scrolls sideways, and
    // the theme lets the keyboard in there as it does on a desk.
    window.reached ??= new WeakSet();
    const phone = innerWidth < 500;
    const other = e => reached.has(e) || e.id == "pst-back-to-top"
                       || (e.type == "radio" && !e.checked)
                       || (phone && e.matches("pre"));
    const seen = e => e.tabIndex >= 0 && !e.disabled && !other(e)
                      && e.getClientRects().length
                      && e.checkVisibility({visibilityProperty: true});
    const waiting = new Map([...document.querySelectorAll(controls)]
      .filter(seen).map(e => [e, look(e)]));
    const faults = [], name = e => e.outerHTML.slice(0, 150);
    const shown = e => {
      const {left, right} = e.getBoundingClientRect();  // the page scrolls up and down
      return e.checkVisibility({opacityProperty: true}) && right > 0 && left < innerWidth;
    };
    const note = ({target: e}) => {
      if (!waiting.has(e)) return;
      if (look(e) == waiting.get(e)) faults.push("no visible focus: " + name(e));
      if (!shown(e)) faults.push("hidden with the focus: " + name(e));
      waiting.delete(e);
      reached.add(e);
    };
    document.addEventListener("focusin", note);
    window.stopListening = () => {
      document.removeEventListener("focusin", note);
      document.activeElement.blur();
    };
    const missed = () => [...waiting.keys()].filter(seen).slice(0, 5).map(name);
    window.tabbed = () => [waiting.size, faults, missed()];
    return waiting.size;
  },

  printed: () => {
    const faults = [], name = e => e.outerHTML.slice(0, 150);
    const seen = e => e.checkVisibility({visibilityProperty: true});
    const check = (fault, selector, test = () => true) => {
      for (const e of document.querySelectorAll(selector))
        if (seen(e) && test(e)) faults.push(fault + ": " + name(e));
    };
    const style = getComputedStyle;
    check("beside the text", ".bd-sidebar-primary, .bd-sidebar-secondary, .bd-header, " +
          ".bd-header-article, .prev-next-area, .copybtn, #pst-back-to-top, .skip-link");
    check("stays on each sheet", "body *", e =>
          ["fixed", "sticky"].includes(style(e).position) && e.offsetHeight);
    check("cut", "main :is(pre, table, div, dt, p, mjx-container)", e =>
          style(e).overflowX != "visible" && e.scrollWidth > e.clientWidth + 1);
    check("folded without a mark", "main details:not([open])", e =>
          !e.querySelector("summary").textContent.trim());
    check("folded", "main .toggle-hidden");
    check("pale", "main :is(p, li, a, code, td, dt, pre, figcaption)", e =>
          Math.min(...style(e).color.match(/[\d.]+/g).slice(0, 3).map(Number)) > 140);
    if (document.documentElement.scrollWidth > innerWidth) faults.push("too wide");
    return [style(document.body).backgroundColor, faults];
  },

  firstText: () => new Promise(done => new PerformanceObserver(list => {
    for (const paint of list.getEntries())
      if (paint.name == "first-contentful-paint") done(paint.startTime);
  }).observe({type: "paint", buffered: true})),

};

// What the tests see in a page: each function is called by the test of that subject.
const controls = "a[href], button, input:not([type=hidden]), select, textarea, " +
                 "summary, audio[controls], video[controls], [tabindex]";

// Those that are seen. The way back to the top is there only while the reader scrolls up;
// arrow keys move between the radio buttons of a group.
const isControl = e => e.tabIndex >= 0 && !e.disabled && e.id != "pst-back-to-top"
                       && !(e.type == "radio" && !e.checked) && e.getClientRects().length
                       && e.checkVisibility({visibilityProperty: true});

const checked = new WeakSet();

const look = e => {
  const {outlineStyle, outlineWidth, outlineColor, boxShadow, borderColor, borderWidth,
         backgroundColor, textDecorationLine} = getComputedStyle(e);
  const outline = outlineStyle == "none" ? "" : outlineWidth + outlineColor;
  return [outline, boxShadow, borderColor, borderWidth, backgroundColor,
          textDecorationLine].join();
};

const inSight = e => {
  const {left, right} = e.getBoundingClientRect();  // the page scrolls up and down
  return e.checkVisibility({opacityProperty: true}) && right > 0 && left < innerWidth;
};

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

  texts: () => ({unsetMath: checks.unsetMath(), rawMath: checks.rawMath(),
                 silentPictures: checks.silentPictures()}),

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
    document.activeElement.blur();
    scrollTo(0, 0);
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

  // One element for each kind of words: they are of a kind if what decides whether they
  // can be read is the same. What is found about one of them holds for all.
  kinds: () => {
    const grounds = new Map(), found = new Map();
    const ground = e => {
      if (!e) return "";
      if (!grounds.has(e)) {
        const s = getComputedStyle(e);
        const own = [s.backgroundColor, s.backgroundImage, s.opacity, s.filter,
                     s.position].join();
        const plain = own == "rgba(0, 0, 0, 0),none,1,none,static";
        grounds.set(e, ground(e.parentElement) + (plain ? "" : "/" + own));
      }
      return grounds.get(e);
    };
    const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
      const e = walk.currentNode.parentElement;
      if (!walk.currentNode.data.trim() || !e.checkVisibility()) continue;
      const s = getComputedStyle(e), around = getComputedStyle(e.parentElement);
      const kind = [e.tagName == "A", s.color, s.fontSize, s.fontWeight, s.textShadow,
                    s.textDecorationLine, s.borderBottomWidth, around.color,
                    around.fontWeight, ground(e)].join();
      if (!found.has(kind)) found.set(kind, e);
    }
    return found;
  },

  // The faults, and the kinds of words that are on the page, here in the whole page or
  // in the kinds of words that are not known.
  axe: async ([allowed, options, known]) => {
    const kinds = checks.kinds();
    const fresh = [...kinds].filter(([kind]) => !known?.includes(kind)).map(([, e]) => e);
    if (!fresh.length) return [[], [...kinds.keys()]];
    const where = known ? {include: fresh} : document;
    const found = await axe.run(where, {resultTypes: ["violations"], ...options});
    const fault = ([rule, selector], v, n) =>
      rule == v.id && document.querySelector(n.target.join(" ")).matches(selector);
    const faults = found.violations
      .filter(v => ["serious", "critical"].includes(v.impact))
      .flatMap(v => v.nodes.filter(n => !allowed.some(a => fault(a, v, n)))
                           .map(n => [v.id, n.target.join(" "), n.html.slice(0, 150)]));
    return [faults, [...kinds.keys()]];
  },

  // Each control that was not seen before takes the focus, is in sight and looks
  // different then, and lets the Tab key lead on.
  focused: () => {
    const faults = [], name = e => e.outerHTML.slice(0, 150);
    const fresh = e => isControl(e) && !checked.has(e);
    const found = [...document.querySelectorAll(controls)].filter(fresh);
    const before = found.map(look);
    found.forEach((e, i) => {
      checked.add(e);
      e.focus({focusVisible: true});
      if (document.activeElement != e) return faults.push("takes no focus: " + name(e));
      if (look(e) == before[i]) faults.push("no visible focus: " + name(e));
      if (!inSight(e)) faults.push("hidden with the focus: " + name(e));
      const tab = {key: "Tab", code: "Tab", keyCode: 9, bubbles: true, cancelable: true};
      if (!e.dispatchEvent(new KeyboardEvent("keydown", tab)))
        faults.push("keeps the focus: " + name(e));
    });
    document.activeElement.blur();
    scrollTo(0, 0);
    return [found.length, faults];
  },

  // Which controls the Tab key has not reached yet, from now on.
  listen: () => {
    const waiting = new Set([...document.querySelectorAll(controls)].filter(isControl));
    document.activeElement.blur();
    scrollTo(0, 0);
    document.addEventListener("focusin", ({target}) => waiting.delete(target));
    window.missed = () => [...waiting].filter(isControl)
                                      .map(e => e.outerHTML.slice(0, 150));
    return waiting.size;
  },

  printed: () => {
    dispatchEvent(new Event("beforeprint"));
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
    const ground = style(document.body).backgroundColor;
    dispatchEvent(new Event("afterprint"));
    return [ground, faults];
  },

  search: term => Search._performSearch(...Search._parseQuery(term)).map(([doc]) => doc),

  firstText: () => new Promise(done => new PerformanceObserver(list => {
    for (const paint of list.getEntries())
      if (paint.name == "first-contentful-paint") done(paint.startTime);
  }).observe({type: "paint", buffered: true})),

};

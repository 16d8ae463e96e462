// How far the reader is: minutes left beside the table of contents, a mark on each
// chapter in the sidebar. Kept in this browser, sent nowhere.
{
  const KEY = "chapters read"; // {path of a chapter: the share that has been seen}

  const load = () => {
    try {
      return JSON.parse(localStorage.getItem(KEY)) ?? {};
    } catch {
      return {}; // no storage, or not ours
    }
  };
  const save = (read) => {
    try {
      localStorage.setItem(KEY, JSON.stringify(read));
    } catch {} // a browser that keeps nothing: the marks last for this page
  };

  const root = new URL(document.documentElement.dataset.content_root, document.baseURI);
  const name = (address) => address.pathname.slice(root.pathname.length);
  const here = name(new URL(document.baseURI));
  const isChapter = (page) => page.startsWith("chapters/");

  const words = (share) => (share > 0.97 ? "read" : `${Math.round(share * 100)} % read`);

  const mark = (link, share) => {
    let shown = link.querySelector(".read-mark");
    if (!share) return shown?.remove();
    if (!shown) {
      shown = document.createElement("span");
      shown.className = "read-mark";
      link.append(shown);
    }
    shown.textContent = share > 0.97 ? "✓" : `${Math.round(share * 100)} %`;
    shown.setAttribute("role", "img");
    shown.setAttribute("aria-label", words(share));
  };

  const chapterLinks = () =>
    [...document.querySelectorAll(".bd-links a.internal")].filter((link) =>
      isChapter(name(link))
    );

  const forget = document.createElement("button");
  forget.className = "forget-progress";
  forget.textContent = "Forget what I have read";

  const show = (read) => {
    for (const link of chapterLinks()) mark(link, read[name(link)] ?? 0);
    forget.hidden = !Object.keys(read).length;
  };

  // The share of the text that lies above the lower edge of the window.
  const seen = (article) => {
    const box = article.getBoundingClientRect();
    return Math.min(1, Math.max(0, (innerHeight - box.top) / box.height));
  };

  const start = () => {
    const sidebar = document.querySelector(".bd-links");
    sidebar?.append(forget);
    forget.addEventListener("click", () => {
      save({});
      show({});
    });

    const article = document.querySelector("article.bd-article");
    const minutes = document.querySelector('meta[name="minutes"]')?.content;
    if (!minutes || !article) return show(load());

    const left = document.createElement("span");
    left.className = "minutes-left";
    document.querySelector(".onthispage")?.append(left);

    let waiting = false;
    const update = () => {
      waiting = false;
      const share = seen(article);
      const more = Math.ceil(minutes * (1 - share));
      left.textContent = more ? `${more} min left` : "read";
      const read = load();
      if (scrollY > 0 && share > (read[here] ?? 0)) {
        read[here] = share;
        save(read);
      }
      show(read);
    };
    addEventListener(
      "scroll",
      () => {
        if (!waiting) requestAnimationFrame(update);
        waiting = true;
      },
      { passive: true }
    );
    update();

    // A link to a cell whose code is folded opens it.
    const open = () => {
      const cell = document.getElementById(location.hash.slice(1));
      if (cell?.matches("div.cell")) {
        cell.querySelector("details.hide")?.setAttribute("open", "");
      }
    };
    addEventListener("hashchange", open);
    open();
  };

  document.addEventListener("DOMContentLoaded", start);
}

"use strict";
(() => {
  const tip = document.getElementById("tip");
  const light = JSON.parse(document.getElementById("palette").textContent);

  // Tooltips: what a mark says, or a landscape's value at the grid's nearest point.
  const say = (text, x, y) => {
    tip.hidden = false;
    if (tip.textContent !== text) tip.textContent = text;
    const box = tip.getBoundingClientRect();
    const left = x + 14 + box.width > innerWidth ? x - box.width - 14 : x + 14;
    const top = y + 14 + box.height > innerHeight ? y - box.height - 14 : y + 14;
    tip.style.left = Math.max(4, left) + "px";
    tip.style.top = Math.max(4, top) + "px";
  };
  const hush = () => { tip.hidden = true; };
  const nearest = (values, share) => Math.round(Math.min(1, Math.max(0, share)) * (values.length - 1));
  const onMap = (sheet, x, y) => {
    const map = sheet.map || (sheet.map = JSON.parse(sheet.dataset.map));
    const box = sheet.getBoundingClientRect();
    const j = nearest(map.a, (x - box.left) / box.width);
    const i = nearest(map.b, (box.bottom - y) / box.height);
    return `a ${map.a[j]}, b ${map.b[i]}\nloss ${map.values[i][j] ?? "–"}`;
  };
  document.addEventListener("pointermove", (event) => {
    const mark = event.target.closest && event.target.closest("[data-tip],[data-map]");
    if (!mark) return document.querySelector(".on") ? undefined : hush();
    say(mark.dataset.tip || onMap(mark, event.clientX, event.clientY), event.clientX, event.clientY);
  });
  document.addEventListener("scroll", hush, { passive: true });

  // The arrow keys go through a focused chart's marks.
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
  const leave = (svg) => {
    for (const mark of svg.querySelectorAll(".on")) mark.classList.remove("on");
    hush();
  };
  for (const svg of document.querySelectorAll("figure svg")) {
    let at = -1;
    svg.addEventListener("keydown", (event) => {
      const marks = [...svg.querySelectorAll("[data-tip]")];
      if (event.key === "Escape") { at = -1; return leave(svg); }
      if (event.key === "Home") at = 0;
      else if (event.key === "End") at = marks.length - 1;
      else if (event.key in step) at = at < 0 ? (step[event.key] > 0 ? 0 : marks.length - 1) : (at + step[event.key] + marks.length) % marks.length;
      else return;
      event.preventDefault();
      if (!marks.length) return;
      leave(svg);
      marks[at].classList.add("on");
      const box = marks[at].getBoundingClientRect();
      say(marks[at].dataset.tip, box.left + box.width / 2, box.top + box.height / 2);
    });
    svg.addEventListener("blur", () => { at = -1; leave(svg); });
  }

  // Tables: a heading sorts by its column, numbers largest first, and again the other way round.
  const value = (row, j) => {
    const cell = row.cells[j];
    return cell.dataset.v === undefined ? cell.textContent.trim() : Number(cell.dataset.v);
  };
  for (const table of document.querySelectorAll("table.sort")) {
    table.tHead.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (!button) return;
      const heading = button.parentElement, j = heading.cellIndex, body = table.tBodies[0];
      const falling = heading.getAttribute("aria-sort") ? heading.getAttribute("aria-sort") === "ascending" : heading.classList.contains("n");
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", falling ? "descending" : "ascending");
      const rows = [...body.rows];
      rows.sort((one, two) => {
        const a = value(one, j), b = value(two, j);
        const empty = (x) => x === "" || x === "–" || Number.isNaN(x) || (heading.classList.contains("n") && typeof x === "string");
        if (empty(a) || empty(b)) return empty(a) - empty(b);
        const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
        return falling ? -order : order;
      });
      body.append(...rows);
    });
  }

  // A table that is cut at its right edge says so, until it is scrolled to its end.
  const sizes = new ResizeObserver((entries) => { for (const entry of entries) hint(entry.target); });
  const hint = (box) => {
    box.toggleAttribute("data-more", box.scrollLeft + box.clientWidth < box.scrollWidth - 1);
  };
  for (const box of document.querySelectorAll(".scroll")) {
    sizes.observe(box);
    box.addEventListener("scroll", () => hint(box), { passive: true });
  }

  // Choices: one option is shown.
  for (const select of document.querySelectorAll("select[data-choice]")) {
    const options = document.querySelectorAll(`[data-of="${select.dataset.choice}"]`);
    const show = () => { for (const option of options) option.hidden = option.dataset.option !== select.value; };
    select.addEventListener("change", show);
    show();
  }

  // Dark or light, whatever the system says.
  document.getElementById("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });

  // Figures as files: on white, with colours instead of variables.
  const alone = (svg) => {
    const copy = svg.cloneNode(true), box = svg.viewBox.baseVal;
    for (const name of ["tabindex", "style"]) copy.removeAttribute(name);
    copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
    copy.setAttribute("width", box.width);
    copy.setAttribute("height", box.height);
    for (const mark of copy.querySelectorAll("[data-tip],[data-map],.on")) {
      mark.removeAttribute("data-tip");
      mark.removeAttribute("data-map");
      mark.removeAttribute("class");
    }
    const sheet = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    for (const [name, value] of [["width", box.width], ["height", box.height], ["fill", "#ffffff"]]) sheet.setAttribute(name, value);
    copy.insertBefore(sheet, copy.querySelector("desc").nextSibling);
    for (const part of [copy, ...copy.querySelectorAll("*")]) {
      for (const attribute of part.attributes) {
        const colour = /^var\(--([a-z0-9]+)\)$/.exec(attribute.value);
        if (colour && Object.hasOwn(light, colour[1])) attribute.value = light[colour[1]];
      }
    }
    return new XMLSerializer().serializeToString(copy);
  };
  const save = (blob, name) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  };
  const png = (text, width, height, name) => {
    const image = new Image(), url = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
    image.onload = () => {
      const canvas = document.createElement("canvas"), scale = 3;
      canvas.width = width * scale;
      canvas.height = height * scale;
      canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
      URL.revokeObjectURL(url);
      canvas.toBlob((blob) => save(blob, name), "image/png");
    };
    image.src = url;
  };
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-save]");
    if (!button) return;
    const figure = button.closest("figure"), svg = figure.querySelector("svg"), box = svg.viewBox.baseVal;
    const text = alone(svg);
    if (button.dataset.save === "png") png(text, box.width, box.height, figure.id + ".png");
    else save(new Blob([text], { type: "image/svg+xml" }), figure.id + ".svg");
  });
})();

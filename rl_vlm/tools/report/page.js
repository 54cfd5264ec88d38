"use strict";
// What the scripts of a page share. All text of a run is set as textContent, never as HTML.
const data = JSON.parse(document.getElementById("data").textContent);
const find = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") made.className = value; else made.setAttribute(key, value);
  }
  for (const child of children) {
    if (child !== null && child !== undefined) made.append(child);
  }
  return made;
}

function shape(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

const number = (value, digits = 3) => value === null || value === undefined ? "–" : String(+value.toFixed(digits));
const signed = (value) => value === null ? "–" : (value > 0 ? "+" : "") + number(value);
const mean = (values) => values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
const part = (group) => data.training[group.run] ? (group.heldOut ? "held out" : "training") : "";
const hasImage = (group) => group.images.some((image) => image !== null) || hasStrip(group);
const hasStrip = (group) => group.videos.some((video) => video.strip !== null);
const rewards = (group) => group.rows.map((row) => row.reward).filter((reward) => reward !== null);

// On a phone, long sections are folded at first.
if (matchMedia("(max-width: 40rem)").matches) {
  for (const folded of document.querySelectorAll("details.fold")) folded.open = false;
}

// The page of a run that goes on reloads itself. It stops if a person asks for it, or if the run seems to have died.
const live = find("live");
if (live) {
  const stay = (words) => {
    window.stop();
    live.textContent = words;
  };
  find("stay").addEventListener("click", () => stay("Not reloading any more."));
  window.addEventListener("load", () => {
    if (Date.now() - Date.parse(live.dataset.written) > 1000 * live.dataset.patience) {
      stay("The run has not written this page for a long time and may have died, so the page no longer reloads.");
    }
  });
}

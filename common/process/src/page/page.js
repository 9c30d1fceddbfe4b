"use strict";
// Replaces the parts of the page that the process reports as changed. Without this script the page does
// not update.
const state = document.getElementById("connection");
const events = new EventSource("events");
events.onopen = () => { state.textContent = "live"; };
events.onerror = () => { state.textContent = "disconnected: the page may be out of date"; };
events.onmessage = (event) => {
  for (const [id, html] of Object.entries(JSON.parse(event.data))) {
    const place = document.getElementById(id);
    if (place) place.innerHTML = html;
  }
};

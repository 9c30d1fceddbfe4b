"use strict";
// Puts into the page what the process says has changed. Without this script the page is as of when it was
// loaded.
const state = document.getElementById("connection");
const events = new EventSource("events");
events.onopen = () => { state.textContent = "live"; };
events.onerror = () => { state.textContent = "not connected: what is shown may be old"; };
events.onmessage = (event) => {
  for (const [id, html] of Object.entries(JSON.parse(event.data))) {
    const place = document.getElementById(id);
    if (place) place.innerHTML = html;
  }
};

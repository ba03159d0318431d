// Search from file://: browsers start no worker there, so its script runs in a hidden frame, with the same messages.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc =
        "<script>postMessage = (data) => parent.postMessage(data, '*')</script>" +
        `<script src="${new URL(url, location.href)}"></script>`;
      this.ready = new Promise((resolve) => this.frame.addEventListener("load", resolve, { once: true }));
      document.body.append(this.frame);
      window.addEventListener("message", ({ source, data }) => {
        if (source === this.frame.contentWindow) this.dispatchEvent(new MessageEvent("message", { data }));
      });
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}

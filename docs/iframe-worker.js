// The search of the site runs in a Worker, which browsers refuse to pages that are opened as files. There this class
// takes its place: it runs the script in a frame, and passes messages between the frame and the page.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = (this.inside = frame.contentWindow)
      const base = new URL(url, location)
      const run = (script) => new Promise((resolve, reject) => {
        const element = inside.document.createElement("script")
        element.onload = resolve
        element.onerror = () => reject(new Error(`cannot load ${element.src}`))
        element.src = new URL(script, base)
        inside.document.body.append(element)
      })
      inside.importScripts = (...scripts) => scripts.reduce((before, script) => before.then(() => run(script)), Promise.resolve())
      inside.postMessage = (data) => this.tell(this, data)
      run(base).then(() => {
        for (const data of this.waiting) this.tell(inside, data)
        this.waiting = null
      })
    }
    tell(target, data) {
      const event = new MessageEvent("message", { data })
      target.dispatchEvent(event)
      if (target === this && this.onmessage) this.onmessage(event)
    }
    postMessage(data) {
      if (this.waiting) this.waiting.push(data)
      else this.tell(this.inside, data)
    }
    terminate() {}
  }
}

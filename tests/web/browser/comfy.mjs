// A Chromium on a running ComfyUI: what the browser tests share. The server's address comes in MOSS_URL.

import assert from "node:assert/strict"
import { randomUUID } from "node:crypto"
import fs from "node:fs"
import os from "node:os"
import path from "node:path"
import { fileURLToPath } from "node:url"
import { chromium } from "playwright-core"

export const URL_BASE = process.env.MOSS_URL ?? "http://127.0.0.1:8188"
const HERE = path.dirname(fileURLToPath(import.meta.url))
export const ROOT = path.resolve(HERE, "../../..")
export const ARTIFACTS = path.resolve(HERE, "../artifacts")
export const PACK = "ComfyUI-MOSS-FP16"
const FLAGS = [
  "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
  "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
]
/** What is ours among the page's messages. */
const OURS = new RegExp(`/extensions/${PACK}/|moss[_.]fp16|\\bMOSS FP16\\b`, "i")
const TIMEOUT = 90_000

export const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms))

export class Page {
  /** Starts a browser with a profile of its own and opens the page with these settings. */
  static async open({ vue = false, dark = true, locale = "en", width = 1500, height = 1000 } = {}) {
    const profile = fs.mkdtempSync(path.join(os.tmpdir(), "moss-chromium-"))
    const context = await chromium.launchPersistentContext(profile, {
      executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
      headless: true,
      args: FLAGS,
      viewport: { width, height },
      acceptDownloads: true,
    })
    try {
      return await Page.#start(context, profile, { vue, dark, locale })
    } catch (error) {
      await context.close() // else the browser keeps the test process alive
      throw error
    }
  }

  static async #start(context, profile, { vue, dark, locale }) {
    context.setDefaultTimeout(TIMEOUT)
    await context.grantPermissions(["clipboard-read", "clipboard-write"], { origin: new URL(URL_BASE).origin })
    const opened = new Page(context, context.pages()[0] ?? (await context.newPage()), profile)
    await opened.load()
    const settings = {
      "Comfy.TutorialCompleted": true, "Comfy.VueNodes.Enabled": vue, "Comfy.ColorPalette": dark ? "dark" : "light",
      "Comfy.Locale": locale, "Comfy.Minimap.Visible": false, "Comfy.Graph.CanvasInfo": false,
      "Comfy.Workflow.WarnBlueprintOverwrite": false, "Comfy.Validation.Workflows": false,
    }
    await opened.page.evaluate(async (values) => {
      for (const [id, value] of Object.entries(values)) await window.app.extensionManager.setting.set(id, value)
    }, settings)
    await opened.load()
    return opened
  }

  constructor(context, page, profile) {
    Object.assign(this, { context, page, profile, messages: [] })
    page.on("pageerror", (error) => this.messages.push(`page error: ${error.stack ?? error}`))
    page.on("console", (message) => {
      if (!["error", "warning"].includes(message.type())) return
      this.messages.push(`${message.type()}: ${message.text()} (${message.location()?.url ?? ""})`)
    })
  }

  async load() {
    await this.page.goto(URL_BASE, { waitUntil: "domcontentloaded" })
    await this.ready()
  }

  async reload() {
    await this.page.reload({ waitUntil: "domcontentloaded" })
    await this.ready()
  }

  async ready() {
    await this.page.waitForFunction(() => {
      const app = window.app
      return app?.graph?.id && app.canvas && app.extensions?.some((e) => e.name === "moss.fp16.panel") && app.vueAppReady
    })
    await this.page.waitForFunction(() => !document.querySelector("#splash-loader, .p-blockui-mask"))
    await sleep(300)
  }

  /** The messages that came from this pack's files or are about them. */
  ours() {
    return this.messages.filter((message) => OURS.test(message))
  }

  assertClean() {
    assert.deepEqual(this.ours(), [])
  }

  async close() {
    await this.context.close()
    fs.rmSync(this.profile, { recursive: true, force: true, maxRetries: 3 })
  }

  // ---- the graph ---------------------------------------------------------------------------------------------------

  /** Loads a UI workflow under an id of its own and sets widgets: {class: {widget: value}}. Returns {class: [node ids]}. */
  async workflow(json, values = {}) {
    json = { ...json, id: randomUUID() }
    return this.page.evaluate(
      async ([json, values]) => {
        const app = window.app
        await app.loadGraphData(json, true, true, null)
        const ids = {}
        for (const node of app.rootGraph.nodes) {
          ;(ids[node.type] ??= []).push(String(node.id))
          for (const [name, value] of Object.entries(values[node.type] ?? {})) {
            const widget = node.widgets?.find((w) => w.name === name)
            if (!widget) throw new Error(`${node.type} has no widget ${name}`)
            widget.value = value
          }
          for (const widget of node.widgets ?? []) {
            if (widget.name === "control_after_generate") widget.value = "fixed"
          }
        }
        return ids
      },
      [json, values],
    )
  }

  /** An empty graph with these nodes side by side: [[class, width]]. Returns {workflow, ids}. */
  async place(nodes) {
    return this.page.evaluate((nodes) => {
      const graph = window.app.rootGraph
      graph.clear()
      let x = 0
      const ids = nodes.map(([type, width]) => {
        const node = window.LiteGraph.createNode(type)
        node.pos = [x, 0]
        graph.add(node)
        node.setSize([width, node.computeSize()[1]])
        x += width + 60
        return String(node.id)
      })
      return { workflow: graph.id, ids }
    }, nodes)
  }

  /** Queues the workflow on screen and returns the prompt's id. */
  async queue() {
    const [response] = await Promise.all([
      this.page.waitForResponse((r) => new URL(r.url()).pathname === "/api/prompt" && r.request().method() === "POST"),
      this.page.evaluate(() => window.app.queuePrompt(0, 1)),
    ])
    const answer = await response.json()
    assert.ok(answer.prompt_id, JSON.stringify(answer))
    return answer.prompt_id
  }

  /** The prompt's entry of /history once it has ended. */
  async history(promptId) {
    for (let i = 0; i < 900; i++) {
      const entry = (await getJson(`/history/${promptId}`))[promptId]
      if (entry?.status) return entry
      await sleep(100)
    }
    throw new Error(`The prompt ${promptId} did not end.`)
  }

  // ---- the panel ---------------------------------------------------------------------------------------------------

  panel(nodeId) {
    return new Panel(this.page, this.page.locator(`.moss-panel[data-node-id="${nodeId}"]`))
  }

  /** Puts the node in the middle at this zoom and width. */
  async show(nodeId, { zoom = 1, width = null, height = null } = {}) {
    await this.page.evaluate(
      ([nodeId, zoom, width, height]) => {
        const app = window.app
        const graph = app.canvas.graph
        const node = graph.getNodeById(nodeId) ?? graph.getNodeById(Number(nodeId))
        if (width) node.setSize([width, Math.max(height ?? 0, node.computeSize()[1])])
        const { clientWidth, clientHeight } = app.canvas.canvas
        app.canvas.ds.scale = zoom
        app.canvas.ds.offset[0] = clientWidth / 2 / zoom - node.pos[0] - node.size[0] / 2
        app.canvas.ds.offset[1] = clientHeight / 2 / zoom - node.pos[1] - node.size[1] / 2
        app.canvas.setDirty(true, true)
      },
      [nodeId, zoom, width, height],
    )
    await sleep(600)
    await this.painted()
  }

  /** Hands the page a message as if the server had sent it. */
  async message(type, detail) {
    await this.page.evaluate(([type, detail]) => window.app.api.dispatchCustomEvent(type, detail), [type, detail])
    await this.painted()
  }

  /** Until what was asked for so far is on screen: the panels repaint in the next frame, however long that takes. */
  async painted() {
    await this.page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done()))))
    await sleep(80)
  }

  async picture(name, locator = null) {
    fs.mkdirSync(ARTIFACTS, { recursive: true })
    await (locator ?? this.page).screenshot({ path: path.join(ARTIFACTS, `${name}.png`) })
  }

  /** A picture of one node with a little room around it. */
  async nodePicture(nodeId, name) {
    const clip = await this.page.evaluate((nodeId) => {
      const app = window.app
      const node = app.canvas.graph.getNodeById(nodeId) ?? app.canvas.graph.getNodeById(Number(nodeId))
      const { scale, offset } = app.canvas.ds
      const box = app.canvas.canvas.getBoundingClientRect()
      const panel = document.querySelector(`.moss-panel[data-node-id="${nodeId}"]`).getBoundingClientRect()
      const x = box.left + (node.pos[0] + offset[0]) * scale - 12
      const y = box.top + (node.pos[1] + offset[1] - 34) * scale - 8
      const right = Math.max(x + node.size[0] * scale + 24, panel.right + 22)
      const bottom = Math.max(panel.bottom + 24, y + (node.size[1] + 40) * scale + 8)
      const left = Math.max(0, x)
      const top = Math.max(0, y)
      return {
        x: left, y: top, width: Math.min(window.innerWidth, right) - left, height: Math.min(window.innerHeight, bottom) - top,
      }
    }, nodeId)
    fs.mkdirSync(ARTIFACTS, { recursive: true })
    await this.page.screenshot({ path: path.join(ARTIFACTS, `${name}.png`), clip })
  }
}

export class Panel {
  constructor(page, root) {
    this.page = page
    this.root = root
  }

  text(part) {
    return this.root.locator(`.moss-${part}`).first().textContent()
  }

  state() {
    return this.text("state")
  }

  async until(check, what) {
    const seen = new Set()
    for (let i = 0; i < 900; i++) {
      const state = (await this.root.count()) ? await this.state() : "no panel"
      seen.add(state)
      if (check(state)) return state
      await sleep(50)
    }
    throw new Error(`${what}: the panel said ${[...seen].join(" | ")}`)
  }

  /** Every different state the panel shows until one passes the check. */
  async watch(check) {
    const seen = []
    for (let i = 0; i < 2400; i++) {
      const state = await this.state()
      if (seen.at(-1) !== state) seen.push(state)
      if (check(state)) return seen
      await sleep(25)
    }
    throw new Error(`The panel said ${seen.join(" | ")}`)
  }

  async click(action) {
    await this.root.locator(`button[data-action="${action}"]`).click()
  }

  /** The table's cells, opened and closed again: [[name, peak, headroom, saturated, clamped, non-finite, over]]. */
  async rows() {
    await this.click("table")
    const rows = await this.root
      .locator(".moss-table tbody tr")
      .evaluateAll((list) => list.map((row) => [...row.children].map((cell) => cell.textContent)))
    await this.click("table")
    return rows.map(([name, ...rest]) => [name.replace(/^\S+ /, ""), ...rest])
  }

  bars() {
    return this.root.locator(".moss-bar")
  }
}

export async function getJson(route) {
  const response = await fetch(`${URL_BASE}${route}`)
  if (!response.ok) throw new Error(`${route}: ${response.status}`)
  return response.json()
}

export function example(name) {
  return JSON.parse(fs.readFileSync(path.join(ROOT, "example_workflows", `${name}.json`), "utf8"))
}

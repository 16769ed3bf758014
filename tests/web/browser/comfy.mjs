// A Chromium on a running ComfyUI: what the browser tests share. The server's address comes in MOSS_URL.

import assert from "node:assert/strict"
import { randomUUID } from "node:crypto"
import fs from "node:fs"
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

/** Asks again and again until the answer is true; slow machines get the time they need. */
export async function until(check, what, seconds = 90) {
  const end = Date.now() + seconds * 1000
  let last
  while (Date.now() < end) {
    last = await check()
    if (last) return last
    await sleep(40)
  }
  throw new Error(`${what}: not within ${seconds} s, the last answer was ${JSON.stringify(last)}`)
}

let browser = null

async function theBrowser() {
  const executablePath = process.env.CHROMIUM ?? "/usr/bin/chromium"
  browser ??= await chromium.launch({ executablePath, headless: true, args: FLAGS })
  return browser
}

const palette = (dark) => (dark ? "dark" : "light")

/** The page's settings are the server's: set before the page is opened, so that it is opened only once. */
async function setSettings(values) {
  const response = await fetch(`${URL_BASE}/settings`, { method: "POST", body: JSON.stringify(values) })
  assert.ok(response.ok, `the settings were refused: ${response.status}`)
}

export class Page {
  static opened = new Set()

  /** A fresh profile with these settings, and the page in it. */
  static async open({ vue = false, dark = true, locale = "en", width = 1500, height = 1000 } = {}) {
    await setSettings({
      "Comfy.TutorialCompleted": true, "Comfy.VueNodes.Enabled": vue, "Comfy.ColorPalette": palette(dark),
      "Comfy.Locale": locale, "Comfy.Minimap.Visible": false, "Comfy.Graph.CanvasInfo": false,
      "Comfy.Workflow.WarnBlueprintOverwrite": false, "Comfy.Validation.Workflows": false,
    })
    const context = await (await theBrowser()).newContext({ viewport: { width, height }, acceptDownloads: true })
    context.setDefaultTimeout(TIMEOUT)
    await context.grantPermissions(["clipboard-read", "clipboard-write"], { origin: new URL(URL_BASE).origin })
    const opened = new Page(context, await context.newPage())
    Page.opened.add(opened)
    try {
      await opened.load()
    } catch (error) {
      await opened.close() // else the browser keeps the test process alive
      throw error
    }
    return opened
  }

  constructor(context, page) {
    Object.assign(this, { context, page, messages: [] })
    page.on("pageerror", (error) => this.messages.push(`page error: ${error.stack ?? error}`))
    page.on("console", (message) => {
      if (!["error", "warning"].includes(message.type())) return
      this.messages.push(`${message.type()}: ${message.text()} (${message.location()?.url ?? ""})`)
    })
  }

  /** Another tab of the same browser. */
  async tab() {
    const tab = new Page(this.context, await this.context.newPage())
    await tab.load()
    return tab
  }

  async theme(dark) {
    await this.page.evaluate((name) => window.app.extensionManager.setting.set("Comfy.ColorPalette", name), palette(dark))
    await this.painted()
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
    Page.opened.delete(this)
    await this.context.close()
    if (Page.opened.size > 0) return
    await browser?.close() // else it keeps the test process alive
    browser = null
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

  /** What `app` does with a node: evaluates `act(node, argument, app)` in the page. */
  async node(nodeId, act, argument = null) {
    return this.page.evaluate(
      ([nodeId, act, argument]) => {
        const graph = window.app.canvas.graph
        const node = graph.getNodeById(nodeId) ?? graph.getNodeById(Number(nodeId))
        return new Function(`return (${act})`)()(node, argument, window.app)
      },
      [nodeId, String(act), argument],
    )
  }

  widget(nodeId, name) {
    return this.node(nodeId, (node, name) => node.widgets.find((w) => w.name === name)?.value, name)
  }

  /** Sets widgets as a hand would, so that undo knows of it. */
  async set(nodeId, values) {
    await this.node(
      nodeId,
      (node, values, app) => {
        app.canvas.emitBeforeChange()
        for (const [name, value] of Object.entries(values)) node.widgets.find((w) => w.name === name).value = value
        app.canvas.emitAfterChange()
      },
      values,
    )
  }

  command(id) {
    return this.page.evaluate((id) => window.app.extensionManager.command.execute(id), id)
  }

  async select(...nodeIds) {
    await this.page.evaluate((ids) => {
      const { canvas } = window.app
      canvas.deselectAll()
      for (const id of ids) canvas.select(canvas.graph.getNodeById(id) ?? canvas.graph.getNodeById(Number(id)))
    }, nodeIds)
  }

  /** What the toasts on screen say. */
  toasts() {
    return this.page.locator("[data-testid='toast']").allInnerTexts()
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
    await this.painted()
    await sleep(120)
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
      const panel = document.querySelector(`.moss-panel[data-node-id="${nodeId}"]`)?.getBoundingClientRect()
      const collapsed = node.flags?.collapsed
      const x = box.left + (node.pos[0] + offset[0]) * scale - 12
      const y = box.top + (node.pos[1] + offset[1] - 34) * scale - 8
      const right = Math.max(x + (collapsed ? 260 : node.size[0]) * scale + 24, (panel?.right ?? 0) + 22)
      const bottom = Math.max((panel?.bottom ?? 0) + 24, y + ((collapsed ? 0 : node.size[1]) + 40) * scale + 8)
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

  shows(part) {
    return this.root.locator(`.moss-${part}`).first().isVisible()
  }

  verdict() {
    return this.root.getAttribute("data-verdict")
  }

  /** What the run was set to: fix, engine, dtype, factors. */
  setup() {
    return this.text("setup")
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

  /** The table's cells, opened and closed again, with the columns' names first; the blocks' without their marks. */
  async rows() {
    await this.click("table")
    const rows = await this.root
      .locator(".moss-table tr")
      .evaluateAll((list) => list.map((row) => [...row.children].map((cell) => cell.textContent)))
    await this.click("table")
    return rows.map(([name, ...rest], index) => [index === 0 ? name : name.replace(/^\S+ /, ""), ...rest])
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

/** The example workflows' file names: they are what the template browser shows as titles. */
export const EXAMPLES = { headless: "MOSS-Image fp16 - without text encoder", textToImage: "MOSS-Image fp16 - text to image" }

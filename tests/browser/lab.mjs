// What a reader does: runs a lesson, drags a slider, runs the exercises, pastes a right solution. Started by run.sh.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";

const [modules, browserPath, server, course, lesson, shots] = process.argv.slice(2);
const { chromium } = createRequire(join(modules, "package.json"))("playwright-core");
const MINUTES = 60_000;

function expect(condition, sentence) {
  if (!condition) throw new Error(sentence);
  console.log("ok:", sentence);
}

async function open(page, path) {
  await page.goto(`${server}/lab/tree/${path}?reset`, { waitUntil: "domcontentloaded" });
  await page.waitForFunction(() => window.jupyterapp !== undefined, null, { timeout: MINUTES });
  await page.evaluate(() => window.jupyterapp.started);
  await page.waitForSelector(".jp-Notebook .jp-Cell", { timeout: MINUTES });
  await page.waitForFunction(
    () => window.jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status === "idle",
    null,
    { timeout: MINUTES },
  );
}

// Runs the notebook from top to bottom and returns its outputs, which must hold no error.
async function runAll(page) {
  await page.evaluate(() => window.jupyterapp.commands.execute("notebook:run-all-cells"));
  await page.waitForFunction(
    () => {
      const code = window.jupyterapp.shell.currentWidget.content.widgets.filter((c) => c.model.type === "code");
      const outputs = code.flatMap((c) => c.model.outputs.toJSON());
      if (outputs.some((o) => o.output_type === "error")) return true;
      return code.every((c) => c.model.executionCount !== null && c.model.executionState !== "running");
    },
    null,
    { timeout: 4 * MINUTES },
  );
  await page.waitForTimeout(1500);
  return page.evaluate(() =>
    window.jupyterapp.shell.currentWidget.content.widgets
      .filter((c) => c.model.type === "code")
      .flatMap((c) => c.model.outputs.toJSON())
      .filter((o) => o.output_type === "error")
      .map((o) => `${o.ename}: ${o.evalue}`),
  );
}

async function dragASlider(page) {
  const box = page.locator(".widget-vbox:has(.noUi-handle):has(img)").first();
  expect(await box.count(), "an explorer with a slider and a picture is there");
  const handle = box.locator(".noUi-handle").first();
  const picture = box.locator("img").first();
  await handle.scrollIntoViewIfNeeded();
  const before = await picture.getAttribute("src");
  const at = await handle.boundingBox();
  await page.mouse.move(at.x + at.width / 2, at.y + at.height / 2);
  await page.mouse.down();
  await page.mouse.move(at.x + at.width / 2 + 60, at.y + at.height / 2, { steps: 6 });
  await page.mouse.up();
  const changed = async () => (await picture.getAttribute("src")) !== before;
  for (let i = 0; i < 40 && !(await changed()); i++) await page.waitForTimeout(250);
  expect(await changed(), "its picture changes when the slider is dragged");
  await picture.scrollIntoViewIfNeeded();
}

// Cells tagged `exercise` of a notebook file, in their order.
function exerciseCells(path) {
  const cells = JSON.parse(readFileSync(path, "utf8")).cells;
  const text = (cell) => (Array.isArray(cell.source) ? cell.source.join("") : cell.source);
  return cells.filter((c) => (c.metadata.tags ?? []).includes("exercise")).map(text);
}

async function solveTheFirst(page) {
  const red = page.locator('.rlcourse-card[data-passed="false"]');
  const reds = await red.count();
  expect(reds > 0, `${reds} red cards before anything is solved`);
  const solution = exerciseCells(join(course, "solutions", `${lesson}.ipynb`))[0];
  await page.evaluate(async (text) => {
    const panel = window.jupyterapp.shell.currentWidget;
    const cells = panel.content.widgets;
    const index = cells.findIndex((c) => (c.model.sharedModel.getMetadata("tags") ?? []).includes("exercise"));
    cells[index].model.sharedModel.setSource(text);
    for (let i = index; i < cells.length; i++) {
      if (cells[i].model.type !== "code") continue;
      panel.content.activeCellIndex = i;
      panel.content.deselectAll();
      await window.jupyterapp.commands.execute("notebook:run-cell");
      if (i > index) break; // the cell after the exercise is its check
    }
  }, solution);
  const green = page.locator('.rlcourse-card[data-passed="true"]');
  await green.first().waitFor({ timeout: MINUTES });
  expect((await green.count()) === 1 && (await red.count()) === reds - 1, "one card is green after the solution is pasted");
  await green.first().scrollIntoViewIfNeeded();
}

const browser = await chromium.launch({ executablePath: browserPath, args: ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"] });
try {
  const page = await browser.newPage({ viewport: { width: 1280, height: 1400 } });
  await open(page, `notebooks/${lesson}.ipynb`);
  const errors = await runAll(page);
  expect(errors.length === 0, `lesson ${lesson} runs from top to bottom ${errors.join("; ")}`);
  await dragASlider(page);
  await page.screenshot({ path: join(shots, "lesson.png") });

  await open(page, `exercises/${lesson}.ipynb`);
  const holes = await runAll(page);
  expect(holes.length === 0, `Run All completes over the holes ${holes.join("; ")}`);
  await solveTheFirst(page);
  await page.screenshot({ path: join(shots, "exercise.png") });
} finally {
  await browser.close();
}

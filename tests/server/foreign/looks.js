// Opens the server's page on a desk and on a phone, light and dark, chats there, and opens a plan's page on a phone.
// Prints what is to be seen as one JSON object, and writes pictures.
// Usage: node looks.js URL CHROMIUM FOLDER PLAN
const path = require("path");
const puppeteer = require("puppeteer-core");

const [url, browserPath, folder, plan] = process.argv.slice(2);
const DESK = { width: 1440, height: 960 };
const PHONE = { width: 390, height: 844, deviceScaleFactor: 2, isMobile: true, hasTouch: true };

async function main() {
  const browser = await puppeteer.launch({ executablePath: browserPath, args: ["--no-sandbox", "--disable-gpu"] });
  const complaints = [];
  const asked = [];
  try {
    const page = await browser.newPage();
    page.on("pageerror", (error) => complaints.push(error.message));
    page.on("console", (message) => message.type() === "error" && complaints.push(message.text()));
    page.on("request", (request) => request.postData() && asked.push(JSON.parse(request.postData())));
    const picture = (name) => page.screenshot({ path: path.join(folder, `${name}.png`), fullPage: true });
    // How far the page is wider than the window, and what is above what.
    const layout = () =>
      page.evaluate(() => {
        const top = (id) => document.getElementById(id)?.getBoundingClientRect().top ?? null;
        const { scrollWidth, clientWidth } = document.documentElement;
        return { over: scrollWidth - clientWidth, playing: top("playing"), numbers: top("numbers") };
      });
    const back = () => page.$eval("body", (element) => getComputedStyle(element).backgroundColor);
    const generated = async () => {
      await page.click("#go");
      await page.waitForFunction(() => !document.querySelector("#go").disabled);
      return page.$eval("#outcome", (element) => element.textContent);
    };
    const said = () => page.$$eval("#turns p", (all) => all.map((each) => [each.className, each.textContent]));
    const seen = { complaints, asked };

    await page.setViewport(DESK);
    await page.goto(url);
    await page.waitForFunction(() => document.querySelector("#health").textContent === "serving");
    seen.main = await page.$$eval("main", (all) => all.length);
    seen.board = await page.$eval("canvas", (element) => [element.getAttribute("role"), element.getAttribute("aria-label")]);
    seen.light = await back();
    await page.$eval("#max_tokens", (element) => (element.value = "12"));
    await page.$eval("#stop", (element) => (element.value = " a"));
    seen.stopped = await generated();
    seen.text = await page.$eval("#answer", (element) => element.textContent);
    await page.$eval("#stop", (element) => (element.value = ""));
    seen.running = await page.evaluate(
      () => [...document.querySelectorAll("#numbers > div")].find((each) => each.innerText.includes("running")).innerText,
    );
    seen.desk = await layout();
    await picture("light");
    await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: "dark" }]);
    seen.dark = await back();
    await picture("dark");

    await page.click("#chat");
    await page.type("#message", "Hi");
    seen.first = await generated();
    await page.type("#message", "Ho");
    await page.keyboard.press("Enter");
    await page.waitForFunction(() => document.querySelectorAll("#turns p").length === 4);
    await page.waitForFunction(() => !document.querySelector("#go").disabled);
    seen.said = await said();
    await picture("chat");
    await page.$eval("#temperature", (element) => (element.value = "-3"));
    await page.type("#message", "Ha");
    seen.refused = await generated();
    seen.kept = [await page.$eval("#message", (element) => element.value), (await said()).length];
    await page.reload();
    await page.click("#chat");
    seen.reloaded = await said();

    await page.setViewport(PHONE);
    await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: "light" }]);
    await page.reload();
    await page.waitForFunction(() => document.querySelector("#numbers").childElementCount > 0);
    seen.phone = await layout();
    await picture("phone");
    await page.click("#chat");
    seen.phoneChat = await layout();
    await picture("phone-chat");
    await page.click("#anew");
    seen.anew = await said();

    await page.goto(`file://${plan}`);
    await page.waitForFunction(() => document.querySelector("#numbers").childElementCount > 0);
    seen.plan = await layout();
    await picture("plan-phone");
    await page.setViewport(DESK);
    await picture("plan");
    console.log(JSON.stringify(seen));
  } finally {
    await browser.close();
  }
}

main();

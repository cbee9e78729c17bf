"use strict";
/* Part 4: the puzzles. An answer is graded in a Worker, so that a loop without an end stops nothing but itself; answers
   and what is solved are kept in localStorage. */

{
  const KEY = "twin-engine.puzzles";
  const SECONDS = 20;

  /** What is kept, or nothing where the browser keeps nothing. */
  function remembered() {
    try {
      return JSON.parse(localStorage.getItem(KEY)) ?? {};
    } catch {
      return {};
    }
  }

  function remember(kept) {
    try {
      localStorage.setItem(KEY, JSON.stringify(kept));
    } catch {
      // a private window: the answers last as long as the page
    }
  }

  /** In the Worker: the verdict on an answer's text, or what is wrong with the text. */
  function judge(puzzles, name, text) {
    const wanted = name.split(" ")[1];
    let answer;
    try {
      const found = `typeof ${wanted} === "function" ? ${wanted} : null`;
      answer = new Function(`"use strict"; ${text}\n;return ${found};`)();
    } catch (error) {
      return {solved: false, sentence: `${name}: ${error} (while your text was read)`};
    }
    try {
      if (answer === null) return {solved: false, sentence: `${name}: there is no function ${wanted}.`};
      return puzzles.grade(name, answer);
    } catch (error) {
      return {solved: false, sentence: `${name}: ${error} (while puzzle ${name} called your function)`};
    }
  }

  const PROGRAM = `"use strict";
    ${makeNumbers}
    ${makePuzzles}
    ${judge}
    onmessage = ({data: {recorded, name, text}}) =>
      postMessage(judge(makePuzzles(makeNumbers(), recorded), name, text));`;

  /** A promise of the verdict. */
  function graded(name, text) {
    const address = URL.createObjectURL(new Blob([PROGRAM], {type: "text/javascript"}));
    const worker = new Worker(address);
    return new Promise((resolve) => {
      const sentence = `${name}: no answer after ${SECONDS} s; is there a loop without an end?`;
      const late = setTimeout(() => resolve({solved: false, sentence}), 1000 * SECONDS);
      worker.onmessage = ({data}) => (clearTimeout(late), resolve(data));
      worker.onerror = () => resolve(judge(makePuzzles(numbers, recorded), name, text)); // where no Worker may be made
      worker.postMessage({recorded, name, text});
    }).finally(() => {
      worker.terminate();
      URL.revokeObjectURL(address);
    });
  }

  const kept = remembered();

  function progress() {
    const count = puzzleTexts.filter(({name}) => kept[name]?.solved).length;
    byId("progress").textContent = `${count} of ${puzzleTexts.length} solved`;
    for (const {name} of puzzleTexts) byId(`puzzle-${name[0]}`).classList.toggle("solved", Boolean(kept[name]?.solved));
  }

  function puzzle({name, title, text, hint, stub}) {
    const verdict = make("output", {class: "verdict", for: `answer-${name[0]}`});
    const answer = make("textarea", {id: `answer-${name[0]}`, rows: 8, spellcheck: "false", autocomplete: "off",
      autocapitalize: "off", "aria-label": `Your answer to puzzle ${name}`});
    answer.value = kept[name]?.text ?? stub;
    const save = (change) => {
      kept[name] = {...kept[name], text: answer.value, ...change};
      remember(kept);
      progress();
    };
    const check = make("button", {type: "button", class: "primary", click: async () => {
      save({});
      check.disabled = true;
      verdict.textContent = "…";
      const {solved, sentence} = await graded(name, answer.value);
      check.disabled = false;
      verdict.textContent = sentence;
      verdict.className = `verdict ${solved ? "right" : "wrong"}`;
      save({solved});
    }}, "Check");
    const again = make("button", {type: "button", click: () => {
      answer.value = stub;
      verdict.textContent = "";
      save({});
    }}, "Begin again");
    answer.addEventListener("input", () => save({}));
    return make(
      "details",
      {class: "puzzle", id: `puzzle-${name[0]}`, open: name === puzzleTexts[0].name},
      make("summary", {}, make("span", {class: "done", "aria-hidden": "true"}), `${name[0]}. ${title}`),
      make("p", {}, text),
      hint ? make("p", {class: "hint"}, `Hint: ${hint}`) : null,
      answer,
      make("div", {class: "controls"}, check, again),
      verdict,
    );
  }

  byId("puzzle-list").append(...puzzleTexts.map(puzzle));
  progress();
}

// Show the rollouts of a step: what was asked and said, and each token by its log-probability, ratio, advantage, mask or version.

const LEVELS = [0.05, 0.22, 0.7, 1.6, 3]; // nats below 0 from which a token is less likely: p 0.95, 0.8, 0.5, 0.2, 0.05
const RATIOS = [0.8, 0.98, 1.02, 1.2]; // below the first a token has become much less likely, from the last on much likelier
const MODES = { logprob: "log-probability", ratio: "ratio", advantage: "advantage", mask: "mask", version: "version of the weights" };

class Rollouts {
  constructor(page) {
    this.page = page;
    this.mode = "logprob";
    this.chosen = 0;
    this.uid = null;
    this.list = el("div", { class: "list", role: "group", "aria-label": "Rollouts of the step" });
    this.view = el("div", { class: "card" });
    this.note = el("p", {});
    this.element = section("rollouts", "Rollouts", null, el("div", { class: "rollouts" }, this.list, this.view));
    this.element.querySelector("header").append(this.note);
  }

  /** Show the rollouts nearest to the page's step; of one prompt if a group was opened. */
  draw() {
    const run = this.page.run(), all = run.rollouts ?? [];
    const steps = [...new Set(all.map((each) => each.step))];
    const step = nearest(steps, this.page.step());
    const ofStep = all.filter((each) => each.step === step);
    this.shown = this.uid && ofStep.some((each) => each.uid === this.uid) ? ofStep.filter((each) => each.uid === this.uid) : ofStep;
    this.chosen = Math.min(this.chosen, Math.max(0, this.shown.length - 1));
    this.note.textContent = this.noteText(run, step, ofStep.length);
    this.list.replaceChildren(...this.shown.map((each, number) => this.entry(each, number)));
    if (this.shown.length < ofStep.length) this.list.append(el("button", { on: { click: () => { this.uid = null; this.draw(); } } }, `All ${plural(ofStep.length, "rollout")} of the step`));
    this.view.replaceChildren(...(this.shown.length ? this.detail(this.shown[this.chosen]) : [el("p", { class: "empty" }, emptyText(run))]));
  }

  /** Return true while a note is being written. */
  isWritten() {
    return Boolean(this.view.querySelector("textarea")?.value);
  }

  noteText(run, step, number) {
    if (step === null) return "";
    const missing = this.uid && !this.shown.some((each) => each.uid === this.uid) ? `; of ${this.uid} none is in this page: coati-rl show RUN --step ${this.page.step()} --uid ${this.uid}` : "";
    const away = step === this.page.step() ? "" : `, the nearest to step ${this.page.step()} that is in this page`;
    return `${plural(number, "rollout")} of step ${step}${away}${missing}`;
  }

  entry(each, number) {
    const reward = each.reward === null ? "not scored" : `reward ${num(each.reward)}`;
    const advantage = each.advantage === null ? "not trained" : `advantage ${each.advantage > 0 ? "+" : ""}${num(each.advantage)}`;
    const note = this.page.notesOf(each).length ? " \u270E" : "";
    const click = () => { this.chosen = number; this.draw(); this.list.children[number]?.focus(); };
    return el("button", { "aria-current": number === this.chosen ? "true" : null, on: { click } },
      el("span", {}, el("b", {}, reward), ` · ${advantage}${note}`), el("span", { class: "soft" }, `${each.uid} · ${each.sample} · ${each.verdict}`), el("span", {}, each.prompt));
  }

  detail(each) {
    const facts = [
      ["prompt", each.uid], ["sample", each.sample], ["reward", num(each.reward)], ["verdict", each.verdict], ["why", each.detail], ["truth", each.truth], ["advantage", num(each.advantage)],
      ["trained", each.is_trained ? "yes" : "no"], ["tokens", num(each.num_tokens)], ["ended by", each.ended ? `${each.finish_reason}, ${each.ended}` : each.finish_reason],
      ["weights", [...new Set(each.versions)].map((version) => `version ${version}`).join(" to ")], ["producer", each.producer],
      ["forks in the episode", each.num_forks || null],
      ["fork of", each.parent_sample === undefined ? null : `sample ${each.parent_sample}, ${plural(each.num_shared_tokens, "token")} shared`],
    ].filter(([, value]) => value !== null && value !== undefined && value !== "");
    return [
      el("div", { class: "pairs" }, facts.map(([name, value]) => el("span", {}, el("span", { class: "soft" }, `${name} `), el("b", {}, String(value))))),
      ...this.conversation(each),
      ...(each.tokens ? this.tokens(each) : [el("p", { class: "empty" }, "Its tokens were not recorded (--rollout-detail text).")]),
      ...this.page.notes(each),
    ];
  }

  conversation(each) {
    const begins = each.messages[0]?.[0] === "answer" ? [["user", each.prompt]] : [];
    return [...begins, ...each.messages].map(([role, text]) =>
      el("div", { class: `said ${["assistant", "answer", "tool"].includes(role) ? role : ""}` }, el("h4", {}, role), el("pre", { tabindex: text.length > 2000 ? "0" : null }, text)));
  }

  tokens(each) {
    const { tokens } = each;
    const modes = el("select", { "aria-label": "Colour tokens by", on: { change: () => { this.mode = modes.value; this.draw(); this.view.querySelector("select").focus(); } } },
      Object.entries(MODES).map(([value, label]) => el("option", { value, selected: value === this.mode }, label)));
    const about = el("span", { class: "soft", role: "status" }, "Choose a token with the pointer or the arrow keys.");
    const box = el("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": "Tokens; the arrow keys choose one" });
    let version = null;
    tokens.pieces.forEach((piece, i) => {
      if (i === tokens.gap_at) box.append(el("span", { class: "gap" }, ` [... ${plural(tokens.num_left_out, "token")} left out ...] `));
      if (this.mode === "version" && tokens.mask[i] && tokens.versions[i] !== version) box.append(el("sup", {}, `v${(version = tokens.versions[i])}`));
      box.append(el("span", { class: this.look(each, i), "data-i": i }, visible(piece)));
    });
    const choose = (span) => {
      box.querySelector(".at")?.classList.remove("at");
      span.classList.add("at");
      about.textContent = this.about(tokens, Number(span.dataset.i));
    };
    box.addEventListener("pointerover", (event) => event.target.dataset?.i && choose(event.target));
    box.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!by) return;
      event.preventDefault();
      event.stopPropagation();
      const spans = [...box.querySelectorAll("[data-i]")], at = spans.indexOf(box.querySelector(".at"));
      choose(spans[Math.min(Math.max(at + by, 0), spans.length - 1)]);
    });
    return [el("div", { class: "filters" }, el("label", {}, el("b", {}, "Tokens"), " by ", modes), about), this.legend(each), box];
  }

  look(each, i) {
    const { tokens } = each;
    if (!tokens.mask[i]) return "masked";
    if (this.mode === "logprob") return `l${LEVELS.filter((level) => -(tokens.logprobs[i] ?? 99) >= level).length}`;
    if (this.mode === "ratio" && (tokens.ratios?.[i] ?? null) !== null) return `r${RATIOS.filter((bound) => tokens.ratios[i] >= bound).length}`;
    if (this.mode === "advantage" && each.advantage) return each.advantage > 0 ? "plus" : "minus";
    if (this.mode === "version") return tokens.versions[i] % 2 ? "odd" : null;
    return null;
  }

  legend(each) {
    const sample = (look, text) => el("span", {}, el("span", { class: "tokens" }, el("span", { class: look }, "token")), ` ${text}`);
    const masked = sample("masked", "not of the policy, not in the loss");
    return el("div", { class: "scale" }, {
      logprob: () => [...["p \u2265 0.95", "\u2265 0.8", "\u2265 0.5", "\u2265 0.2", "\u2265 0.05", "< 0.05"].map((text, level) => sample(`l${level}`, text)), masked],
      ratio: () => (each.tokens.ratios
        ? [...["< 0.8", "< 0.98", "to 1.02", "\u2265 1.02", "\u2265 1.2"].map((text, level) => sample(`r${level}`, text)), masked]
        : [el("span", {}, `Ratios are not recorded; coati-rl replay RUN --step ${each.step} --ratios computes those of a step.`)]),
      advantage: () => [sample("plus", "made likelier"), sample("minus", "made less likely"), masked],
      mask: () => [sample(null, "in the loss if the sample is trained"), masked],
      version: () => [sample(null, "even version"), sample("odd", "odd version"), masked],
    }[this.mode]());
  }

  about(tokens, i) {
    const text = JSON.stringify(tokens.pieces[i]);
    if (!tokens.mask[i]) return `${text}: not of the policy`;
    const logprob = tokens.logprobs[i];
    const chance = logprob === null ? "log-probability not finite" : `log-probability ${num(logprob)}, probability ${num(Math.exp(logprob))}`;
    const ratio = tokens.ratios?.[i] ?? null;
    return `${text}: ${chance}${ratio === null ? "" : `, ratio ${num(ratio)}`}, version ${tokens.versions[i]}`;
  }
}

/** Return a token's text with marks where it would not be seen. */
function visible(piece) {
  if (piece === "") return "\u00B7";
  return piece.replace(/\n/g, "\u21B5\n").replace(/\t/g, "\u2192\t").replace(/^ | $/g, "\u00A0");
}

function nearest(steps, step) {
  if (!steps.length) return null;
  return steps.reduce((best, each) => (Math.abs(each - step) < Math.abs(best - step) ? each : best));
}

"""Review by keys: one kernel a screen, decisions written at once, evidence done again in the background."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import Footer, Input, OptionList, Static
from textual.widgets.option_list import Option

from generated.library import LibraryError
from generated.passport import Passport, Verb
from verifier.pool import Pool

from . import present
from .recheck import Recheck, not_rechecked, recheck, recorded
from .session import PAST, Card, Refused, Review

Key = tuple[str, str]  # task, kernel
ALARM = f"bold {present.RED}"
NARROW = 110  # columns below which the queue is folded away
_HELP = """\
a  accept        r  reject           c  request changes
u  take your last decision back: a rejection or a request is
   restored, an acceptance retired; the history keeps both
n  next kernel   p  previous kernel  l  show or fold the queue
d  diff: unified, or side by side
b  blind review: it counts if you have not seen the author
e  do the evidence again             q  leave
Arrows, PgUp, PgDn, Home, End scroll; Tab goes to the other half.

A decision is written when you press Enter after its reason.
An acceptance waits for the evidence to be done again; you can
go on with other kernels meanwhile.

· proposed  ✓ accepted  ✗ rejected  ↺ changes requested
− retired   ! unreadable            … waits for its evidence
▲ faster  ▼ slower  = level with 95 % confidence
° the baseline computes only some of the outputs

Any key closes this."""


@dataclass(frozen=True)
class Subject:
    """What a recheck is about: it holds for this text and this recorded object only."""

    key: Key
    source_sha256: str
    object: str


def subject(p: Passport) -> Subject:
    then = recorded(p)
    return Subject((p.task, p.kernel), p.source_sha256, then.sha256 if then else "")


@dataclass
class Waiting:
    """A decision that waits for the evidence."""

    passport: Passport
    verb: Verb
    reason: str
    seen: str
    blind: bool


class Stage(Message):
    """The recheck of a kernel has come this far."""

    def __init__(self, about: Subject, text: str):
        super().__init__()
        self.about, self.text = about, text


class Rechecked(Message):
    """The recheck of a kernel is done, or could not be made (a text)."""

    def __init__(self, about: Subject, result: Recheck | str):
        super().__init__()
        self.about, self.result = about, result


class Help(ModalScreen):
    """The keys."""

    def compose(self) -> ComposeResult:
        yield Static(_HELP, id="help", markup=False)

    def on_key(self) -> None:
        self.dismiss()


class ReviewScreen(App[None]):
    """The screen. ``decisions`` says afterwards what was decided.

    Args:
        again: do the evidence again, in the background; else acceptances say that it was not.
    """

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #queue { width: 40; border: none; border-right: solid $panel; background: $background; padding: 0; }
    #facts { height: auto; max-height: 70%; padding: 0 1; border: none; border-top: solid $panel; }
    #diff { height: 1fr; padding: 0 1; border: none; border-top: solid $panel; }
    #facts { border-title-color: $foreground; }
    #facts:focus, #diff:focus { border-top: solid $accent; }
    #queue, #facts, #diff { scrollbar-size-vertical: 1; scrollbar-color: $panel; scrollbar-color-hover: $accent; }
    #message { height: auto; max-height: 4; padding: 0 1; background: $boost; }
    #reason { display: none; height: 3; }
    #help { width: auto; height: auto; padding: 0 2; border: round $accent; background: $surface; }
    Help { align: center middle; }
    """
    # priority: carried out before the next key is looked at, so that what follows "a" is the reason, however fast
    BINDINGS: ClassVar = [
        Binding("a", "ask('accept')", "Accept", priority=True),
        Binding("r", "ask('reject')", "Reject", priority=True),
        Binding("c", "ask('request changes')", "Changes", priority=True),
        Binding("u", "undo", "Undo", priority=True),
        Binding("d", "diff", "Diff", priority=True),
        Binding("b", "blind", "Blind", priority=True),
        Binding("n", "move(1)", "Next", priority=True),
        Binding("p", "move(-1)", "Prev", priority=True),
        Binding("question_mark", "help", "Help", key_display="?", priority=True),
        Binding("q", "leave", "Quit", priority=True),
        Binding("l", "queue", "Queue", show=False, priority=True),
        Binding("e", "again", "Evidence", show=False, priority=True),
        Binding("escape", "cancel", "Back", show=False),
        Binding("ctrl+c", "leave_now", "Quit", show=False, priority=True),
    ]

    def __init__(self, review: Review, tasks: list[str] | None = None, again: bool = True):
        super().__init__()
        self.review, self.tasks, self.again = review, tasks, again
        self.decisions: list[str] = []
        self.entries: list[Passport] = []  # as they were read last
        self.problems: list[str] = []
        self.at, self.card = 0, None
        self.side_by_side = False
        self.asked: tuple[Verb, Passport, Card] | None = None
        self.waiting: dict[Key, Waiting] = {}
        self.undone: list[Passport] = []  # own decisions that can be taken back, oldest first
        self.named: set[Key] = set()  # kernels whose author this reviewer has seen
        self.results: dict[Subject, Recheck | str] = {}
        self.stage: tuple[Subject, str] | None = None
        self.stopping, self.work = threading.Event(), threading.Event()
        self.pool: Pool | None = None
        self.warned = False

    def compose(self) -> ComposeResult:
        with Horizontal():
            yield OptionList(id="queue")
            with Vertical():
                with VerticalScroll(id="facts"):
                    yield Static(id="card", markup=False)
                with VerticalScroll(id="diff"):
                    yield Static(id="lines", markup=False)
        yield Static(id="message", markup=False)
        yield Input(id="reason")
        yield Footer(compact=True)

    def on_mount(self) -> None:
        self.query_one("#queue").can_focus = False
        self._load()
        self._go(0)
        if self.entries:
            self.query_one("#diff").focus()
        if self.again:
            threading.Thread(target=self._recheck_all, daemon=True).start()

    def on_unmount(self) -> None:
        self.stopping.set()
        self.work.set()
        if self.pool:
            self.pool.close()

    def on_resize(self) -> None:
        self.query_one("#queue").display = self.size.width >= NARROW
        self.call_after_refresh(self._show)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Keys are text while a reason is asked for, and close the help while it is shown."""
        busy = self.asked is not None or len(self.screen_stack) > 1
        return action in ("cancel", "leave_now") or not busy or not hasattr(ReviewScreen, f"action_{action}")

    # --- what is shown ---

    def _load(self) -> None:
        """The queue, read once: kernels stay where they are while their states change."""
        entries, self.problems = self.review.queue(self.tasks)
        self.entries = [e.passport for e in entries]

    @property
    def current(self) -> Passport | None:
        return self.entries[self.at] if self.at < len(self.entries) else None

    def _go(self, to: int) -> None:
        """Show a kernel, or an unreadable passport, read afresh."""
        rows = len(self.entries) + len(self.problems)
        self.at = max(0, min(to, rows - 1))
        self._read()
        self._show()
        self.query_one("#diff").scroll_home(animate=False)
        self.query_one("#facts").scroll_home(animate=False)
        self.work.set()

    def _read(self) -> None:
        """Take up the present state of the kernel at hand."""
        self.card = None
        if self.current is None:
            return
        try:
            self.entries[self.at] = self.review.find(self.review.name(self.current))
            self.card = self.review.card(self.current)
        except LibraryError as e:
            self._say(self.review.told(str(e)), ALARM)
        if not self.review.blind:
            self.named.add(self._key(self.current))

    @staticmethod
    def _key(p: Passport) -> Key:
        return p.task, p.kernel

    def _show(self) -> None:
        self._show_queue()
        place = f"{min(self.at + 1, len(self.entries))} of {len(self.entries)}{' blind' if self.review.blind else ''}"
        self.query_one("#facts").border_title = place
        card, lines = self.query_one("#card", Static), self.query_one("#lines", Static)
        width = max(40, self.query_one("#facts").size.width - 3)
        if self.card:
            card.update(present.facts(self.card, width, self._evidence()))
            lines.update(present.difference(self.card, width, self.side_by_side))
            return
        lines.update("")
        if self.at - len(self.entries) < len(self.problems):
            problem = self.problems[self.at - len(self.entries)]
            card.update(
                Text.assemble(("! unreadable passport\n\n", ALARM), problem, "\n\nNothing can be decided about it.")
            )
        elif self.current is None:
            card.update("Nothing is proposed. coda-agent generate or submit proposes kernels; q leaves.")

    def _show_queue(self) -> None:
        options = []
        for p in self.entries:
            mark, style = ("…", "yellow") if self._key(p) in self.waiting else present.MARKS[p.state]
            task, _, rest = self.review.name(p).partition("#" if self.review.blind else "/")
            options.append(
                Option(Text.assemble((f"{mark} ", style), task, (f"\n   {rest}", "dim")), id=f"{p.task}/{p.kernel}")
            )
        options += [Option(Text.assemble(("! ", ALARM), "unreadable passport")) for _ in self.problems]
        queue = self.query_one("#queue", OptionList)
        queue.clear_options()
        queue.add_options(options)
        queue.highlighted = self.at if options else None

    def _evidence(self) -> Recheck | str | None:
        """What is known of the recheck of the kernel at hand."""
        if self.current is None or self.current.state == "accepted":
            return None
        about = subject(self.current)
        waits = "; the decision waits for it" if self._key(self.current) in self.waiting else ""
        if not self.again:
            return "the evidence is not done again (--no-recheck)"
        result = self.results.get(about)
        if isinstance(result, Recheck):
            return result
        if result:
            return f"the evidence could not be done again: {result}"
        if self.stage and self.stage[0] == about:
            return f"doing the evidence again: {self.stage[1]}{waits}"
        return f"the evidence will be done again when the worker is free{waits}"

    def _say(self, text: str, style: str = "") -> None:
        self.query_one("#message", Static).update(Text(text, style=style))

    # --- moving about ---

    def action_move(self, step: int) -> None:
        self._go(self.at + step)

    @on(OptionList.OptionSelected, "#queue")
    def _picked(self, event: OptionList.OptionSelected) -> None:
        if event.option_index != self.at:
            self._go(event.option_index)

    def action_queue(self) -> None:
        queue = self.query_one("#queue")
        queue.display = not queue.display
        self.call_after_refresh(self._show)

    def action_diff(self) -> None:
        self.side_by_side = not self.side_by_side
        self._show()
        if self.card and not self.card.base["source"]:
            self._say("there is nothing to compare with side by side")

    def action_blind(self) -> None:
        kernel = self.current
        self.review.blind = not self.review.blind
        self._load_names(kernel)
        self._say(
            "blind review: authors are hidden"
            if self.review.blind
            else "authors are shown: decisions no longer count as blind"
        )

    def _load_names(self, kernel: Passport | None) -> None:
        """The order of the queue must not tell authors apart, so it follows the names that are shown."""
        self.entries.sort(key=self.review.name)
        self.problems = self.review.queue(self.tasks)[1]
        self._go(next((i for i, p in enumerate(self.entries) if kernel and self._key(p) == self._key(kernel)), self.at))

    def action_help(self) -> None:
        self.push_screen(Help())

    def action_again(self) -> None:
        if self.current and self.again:
            self.results.pop(subject(self.current), None)
            self.work.set()
            self._show()

    # --- deciding ---

    def action_ask(self, verb: Verb) -> None:
        """Ask for the reason; the decision is about what is on the screen now."""
        if self.current is None or self.card is None:
            return self._say("there is nothing to decide about here", "yellow")
        if self._key(self.current) in self.waiting:
            return self._say("its decision already waits for the evidence; Esc on this kernel drops it", "yellow")
        if refusal := self.current.refusal(verb):
            return self._say(self.review.told(refusal), "yellow")
        self.asked = verb, self.current, self.card
        box = self.query_one("#reason", Input)
        box.value, box.border_title = "", f"{verb}: {'the note to the author' if verb == 'request changes' else 'why?'}"
        box.border_subtitle = "Enter decides, Esc goes back"
        box.display = True
        self.screen.set_focus(box)  # at once: the next key is already part of the reason
        return None

    def action_cancel(self) -> None:
        if self.asked:
            self._close_box()
            self._say("nothing was decided")
        elif self.current and self.waiting.pop(self._key(self.current), None):
            self._say("the waiting decision was dropped")
            self._show()

    def _close_box(self) -> None:
        self.asked = None
        self.screen.set_focus(self.query_one("#diff"))
        self.query_one("#reason").display = False

    @on(Input.Submitted, "#reason")
    def _reason_given(self, event: Input.Submitted) -> None:
        if not self.asked:
            return
        if not event.value.strip():
            self._say("a decision needs a reason; Esc goes back", "yellow")
            return
        verb, passport, card = self.asked
        self._close_box()
        blind = self.review.blind and self._key(passport) not in self.named
        wanted = Waiting(passport, verb, event.value, card.seen, blind)
        if not self.review.leads_to_service(passport, verb):
            self._write(wanted, None)
        elif not self.again:
            self._write(wanted, not_rechecked("--no-recheck"))
        elif isinstance(result := self.results.get(subject(passport)), Recheck):
            self._write(wanted, result)
        else:
            self.results.pop(subject(passport), None)
            self.waiting[self._key(passport)], self.warned = wanted, False
            self.work.set()
            self._say(f"{self.review.name(passport)} is accepted as soon as its evidence reproduces; go on meanwhile")
            self._next()

    def _write(self, wanted: Waiting, evidence: Recheck | dict | None) -> None:
        """Write a decision; what refuses it is said, and the kernel is read again."""
        key = self._key(wanted.passport)
        try:
            done = self.review.decide(
                wanted.passport, wanted.verb, wanted.reason, wanted.seen, evidence, blind=wanted.blind
            )
        except (Refused, LibraryError) as e:
            self._say(self.review.told(str(e)), ALARM)
            self._refresh(key)
            self._go(self.at)
            return
        self.undone.append(done)
        self.decisions.append(self.review.said(done))
        self._say(self.review.said(done), "green")
        here = self.current is not None and self._key(self.current) == key
        self._refresh(key)
        if here:
            return self._next()
        self._read()  # the kernel on the screen may have a new incumbent
        self._show()
        return None

    def _refresh(self, key: Key) -> None:
        """Read one kernel of the queue again."""
        for i, p in enumerate(self.entries):
            if self._key(p) == key:
                try:
                    self.entries[i] = self.review.find(self.review.name(p))
                except LibraryError as e:
                    self._say(self.review.told(str(e)), ALARM)

    def _next(self) -> None:
        """The next kernel that is still open, if any."""
        n = len(self.entries)
        order = [(self.at + k) % n for k in range(1, n)]
        is_open = (
            i for i in order if self.entries[i].state == "proposed" and self._key(self.entries[i]) not in self.waiting
        )
        self._go(next(is_open, self.at))

    def action_undo(self) -> None:
        """Take the last decision of this sitting back, unless somebody decided after it."""
        if not self.undone:
            return self._say("you have decided nothing yet that could be taken back", "yellow")
        mine = self.undone.pop()
        try:
            fresh = self.review.find(self.review.name(mine))
            if mine.history[-1] not in fresh.standing[-1:]:
                last = fresh.history[-1]
                raise Refused(
                    f"{self.review.name(mine)}: {last.reviewer} decided meanwhile ({last.verb}: {last.reason})"
                )
            verb: Verb = "retire" if fresh.state == "accepted" else "restore"
            reason = f"taken back: {PAST[mine.history[-1].verb]} by mistake"
            done = self.review.decide(fresh, verb, reason, self.review.library.seen(fresh), blind=False)
        except (Refused, LibraryError) as e:
            return self._say(self.review.told(str(e)), ALARM)
        self.decisions.append(self.review.said(done))
        self._refresh(self._key(done))
        self._go(next((i for i, p in enumerate(self.entries) if self._key(p) == self._key(done)), self.at))
        self._say(f"taken back: {self.review.name(done)} is {done.state}", "green")
        return None

    def action_leave(self) -> None:
        """Leave; once with a warning when decisions would be dropped."""
        if self.waiting and not self.warned:
            self.warned = True
            names = ", ".join(self.review.name(w.passport) for w in self.waiting.values())
            return self._say(
                f"not yet accepted, the evidence is still being done: {names}; q again leaves without", "yellow"
            )
        self.exit()
        return None

    def action_leave_now(self) -> None:
        self.exit(return_code=130)

    # --- evidence, in a thread of its own ---

    def _wanted(self) -> Passport | None:
        """What to recheck next: what a decision waits for, what is on the screen, then the rest."""
        waiting = [w.passport for w in list(self.waiting.values())]
        current = [self.current] if self.current else []
        for p in [*waiting, *current, *self.entries]:
            if subject(p) not in self.results and (p.state == "proposed" or p in waiting or p in current):
                return p
        return None

    def _worker(self) -> Pool:
        self.pool = self.pool or Pool()
        return self.pool

    def _recheck_all(self) -> None:
        while not self.stopping.is_set():
            self.work.clear()
            p = self._wanted()
            if p is None:
                self.work.wait()
                continue
            about = subject(p)
            try:
                say = lambda stage, about=about: self.post_message(Stage(about, stage))
                result = recheck(p, self.review.library, self.review.suite, self._worker, say)
            except Exception as e:  # the task's reference is the user's own code
                result = f"{type(e).__name__}: {e}"
            if self.stopping.is_set():
                return
            self.results[about] = result  # before the message, so that this loop goes on to the next
            self.post_message(Rechecked(about, result))

    @on(Stage)
    def _progressed(self, event: Stage) -> None:
        self.stage = event.about, event.text
        if self.current and event.about.key == self._key(self.current):
            self._show()

    @on(Rechecked)
    def _done_again(self, event: Rechecked) -> None:
        wanted = self.waiting.pop(event.about.key, None)
        if wanted and isinstance(event.result, Recheck):
            self._write(wanted, event.result)
        elif wanted:
            self._say(f"{self.review.name(wanted.passport)} was not accepted: {self.review.told(event.result)}", ALARM)
        self._show()

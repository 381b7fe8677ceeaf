"""A headless Chromium, driven over its DevTools pipe: nothing but the browser itself is needed."""

import fcntl
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SECONDS = 60


def find() -> str | None:
    """The path of a Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """A page in the browser, and everything it complained about or asked the network for."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands = commands
        self._answers = answers
        self._unread = b""
        self._last_id = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Runtime", "Log", "Network", "Page"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last_id:
                assert "error" not in answer, f"{method}: {answer}"
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer.get("method", ""), answer.get("params", {}))

    def open(self, path: Path, *, width: int = 1200) -> None:
        """Go to a file in a window of this width; what was noted before is forgotten."""
        self.complaints.clear()
        self.requests.clear()
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )
        self.send("Page.navigate", url=path.as_uri())
        self.wait_for(f"document.readyState === 'complete' && location.href === {path.as_uri()!r}")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + SECONDS
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, f"not within {SECONDS} s: {expression}; {self.complaints}"
            time.sleep(0.05)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            received = os.read(self._answers, 1 << 16)
            assert received, "the browser ended"
            self._unread += received
        message, _, self._unread = self._unread.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def _note(self, event: str, values: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])
        elif event == "Runtime.exceptionThrown" or (
            event == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert")
        ):
            self.complaints.append(json.dumps(values))
        elif event == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
            self.complaints.append(values["entry"]["text"])


@contextmanager
def open_page(browser: str, profile: Path) -> Iterator[Page]:
    """Start a browser with a profile of its own and give an empty page of it."""
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--no-first-run",
        f"--user-data-dir={profile}",
        "--remote-debugging-pipe",  # commands come in at descriptor 3, answers leave at 4
    ]
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for pipe in (os.pipe(), os.pipe()) for end in pipe]
    commands_out, commands_in, answers_out, answers_in = ends
    log = os.open(profile.with_suffix(".log"), os.O_WRONLY | os.O_CREAT)
    process = os.posix_spawn(
        browser,
        [browser, *flags],
        dict(os.environ),
        file_actions=[
            (os.POSIX_SPAWN_DUP2, commands_out, 3),
            (os.POSIX_SPAWN_DUP2, answers_in, 4),
            (os.POSIX_SPAWN_DUP2, log, 1),
            (os.POSIX_SPAWN_DUP2, log, 2),
        ],
    )
    for end in (commands_out, answers_in, log):
        os.close(end)
    try:
        yield Page(commands_in, answers_out)
    finally:
        os.kill(process, signal.SIGTERM)
        os.waitpid(process, 0)
        os.close(commands_in)
        os.close(answers_out)

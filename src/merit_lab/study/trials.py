"""The trials of a study as Optuna holds them: each planned once, handed out to one process at a time.

The run directory is the truth about a trial. Optuna's journal says which trials there are and which began;
without it, it is made again from the trials and their runs. A process that trains holds a lock on its trial,
which the kernel frees however the process ends. So a trial that began and that nobody holds is an orphan:
whoever takes it resumes its run, under the same number.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import socket
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from merit_lab.runs import Run, RunInUse, durable, lock
from merit_lab.study.trial import Trial

if TYPE_CHECKING:
    from optuna import Study
    from optuna.storages import BaseStorage
    from optuna.storages.journal import JournalFileOpenLock
    from optuna.trial import FrozenTrial

_JOURNAL, _IDENTITY = "study.journal", "study.json"
_PATIENCE = 120.0  # seconds to wait for the folder, which is locked while trials are added


class Trials:
    """The trials in a study's folder, which all machines that work on it share.

    Args:
        folder: the folder.
        storage: URL of a database that replaces the journal, as in postgresql://user@host/name.
    """

    def __init__(self, folder: Path, storage: str | None = None) -> None:
        self.folder = folder
        with lock(folder, patience=_PATIENCE):
            self._study, self._storage = _open(folder, storage)

    def add(self, trials: Sequence[Trial]) -> None:
        """Add the trials that are not there yet, in this order. What a name stands for never changes."""
        with lock(self.folder, patience=_PATIENCE):
            there = {one.user_attrs["run"]: one.user_attrs["config"] for one in self._frozen()}
            planned = {self._name(trial): trial.config.fingerprint for trial in trials}
            for name, config in planned.items():
                if there.get(name, config) != config:
                    raise ValueError(
                        f"{self.folder} has planned {name} with other settings; give the options that it was "
                        "planned with, or another folder with --out"
                    )
            for name, config in planned.items():
                if name not in there:
                    self._study.enqueue_trial({}, user_attrs={"run": name, "config": config})
        with contextlib.ExitStack() as held:
            self._take([trial for trial in trials if trial.is_done], held)  # which tells of them

    @contextlib.contextmanager
    def take(self, wanted: Sequence[Trial]) -> Iterator[Trial | None]:
        """Hold one of these trials that is not done and that nobody else holds; None if there is none now."""
        with contextlib.ExitStack() as held:
            taken = self._take(wanted, held)
            yield None if taken is None else taken[0]
            if taken is not None and taken[0].is_done:
                self._tell(*taken)

    def _take(self, wanted: Sequence[Trial], held: contextlib.ExitStack) -> tuple[Trial, int] | None:
        from optuna.trial import TrialState

        names = {self._name(trial): trial for trial in wanted}
        left = [
            one for one in self._frozen() if one.user_attrs["run"] in names and not one.state.is_finished()
        ]
        for one in sorted(left, key=lambda one: one.state == TrialState.RUNNING):  # orphans last
            name = one.user_attrs["run"]
            with contextlib.ExitStack() as tried:
                try:
                    tried.enter_context(lock(self.folder / ".claims" / name, patience=0))
                except RunInUse:
                    continue
                state = self._storage.get_trial(self._id(one.number)).state
                if state.is_finished():
                    continue  # another process has just done it
                if state == TrialState.WAITING:
                    self._storage.set_trial_state_values(self._id(one.number), TrialState.RUNNING)
                if names[name].is_done:  # without Optuna, or before its journal was written
                    self._tell(names[name], one.number)
                    continue
                held.push(tried.pop_all())
                return names[name], one.number
        return None

    def _tell(self, trial: Trial, number: int) -> None:
        """Record how the run of a trial ended, for those who look at the study with Optuna's tools."""
        from optuna.trial import TrialState

        run = Run.open(trial.folder)
        loss = run.last_loss
        if run.outcome == "finished" and loss is not None and math.isfinite(loss):
            self._study.tell(number, loss)
        else:
            self._study.tell(number, state=TrialState.FAIL)

    def _frozen(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def _id(self, number: int) -> int:
        study_id = self._storage.get_study_id_from_name(self._study.study_name)
        return self._storage.get_trial_id_from_study_id_trial_number(study_id, number)

    def _name(self, trial: Trial) -> str:
        return str(trial.folder.resolve().relative_to(self.folder.resolve()))


def _open(folder: Path, url: str | None) -> tuple[Study, BaseStorage]:
    """The study of a folder in its journal, or in a database; made if there is none. The folder is locked."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    name, path = folder.resolve().name, folder / _JOURNAL
    try:
        if url is None:
            backend = optuna.storages.journal.JournalFileBackend(str(path), lock_obj=_kernel_lock(path))
            storage: BaseStorage = optuna.storages.JournalStorage(backend)
        else:
            storage = optuna.storages.RDBStorage(url)
        sampler = optuna.samplers.RandomSampler()  # never asked
        study = optuna.create_study(
            study_name=name, storage=storage, sampler=sampler, direction="minimize", load_if_exists=True
        )
        identity = study.user_attrs.get("identity")
        has_trials = bool(study.get_trials(deepcopy=False))
    except Exception as error:  # of the database's driver, or of a damaged journal
        where = path if url is None else url
        way_out = (
            f"remove {path}: the same command makes it again from the runs, and repeats none"
            if url is None
            else "check --storage, as in postgresql://user@host/name; its driver is psycopg[binary]"
        )
        raise ValueError(f"{where} cannot be read ({error}); {way_out}") from error
    here = _identity(folder)
    if url is not None and url.startswith("sqlite") and here["machine"] != socket.gethostname():
        raise ValueError(
            f"{url} is SQLite, which several machines cannot share safely, and the study began on "
            f"{here['machine']}; use the journal in the folder (no --storage), or PostgreSQL"
        )
    if identity is None and not has_trials:
        study.set_user_attr("identity", here["identity"])
    elif url is not None and identity != here["identity"]:
        raise ValueError(
            f"{url} has a study {name} whose runs are not in {folder}; work on it in the folder that all its "
            "machines share, or name another with --out"
        )
    return study, storage


def _identity(folder: Path) -> dict[str, str]:
    """What tells the study of a folder from another of its name, and the machine that began it."""
    path = folder / _IDENTITY
    if not path.exists():
        here = {"identity": uuid.uuid4().hex, "machine": socket.gethostname()}
        durable.write(path, json.dumps(here) + "\n")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {key: str(found[key]) for key in ("identity", "machine")}
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(
            f"{path} is not as the lab wrote it; restore it, or remove it and {_JOURNAL}"
        ) from None


def _kernel_lock(path: Path) -> JournalFileOpenLock:
    """A lock of the journal that ends with its process, and removes the half line of one that was killed."""
    from optuna.storages.journal import JournalFileOpenLock

    class KernelLock(JournalFileOpenLock):
        def acquire(self) -> bool:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            whole = path.read_bytes().rfind(b"\n") + 1
            if whole < os.fstat(self._file).st_size:
                os.ftruncate(self._file, whole)
            return True

        def release(self) -> None:
            os.close(self._file)

    return KernelLock(str(path))

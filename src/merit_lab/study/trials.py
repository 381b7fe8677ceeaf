"""The trials of a study as Optuna holds them: each planned once, handed out to one process at a time.

The run directory is the truth about a trial. Optuna's journal says which trials there are and which began;
without it, it is made again from the trials and their runs. A process that trains holds a lock on its trial,
which the kernel frees however the process ends. So a trial that began and that nobody holds is an orphan:
whoever takes it resumes its run, under the same number.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import socket
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from merit_lab.json_values import encode, read_object
from merit_lab.runs import Run, RunInUse, durable, lock
from merit_lab.study.trial import Trial, settings_of

if TYPE_CHECKING:
    from optuna import Study
    from optuna.storages import BaseStorage
    from optuna.storages.journal import JournalFileOpenLock
    from optuna.trial import FrozenTrial

_JOURNAL, _IDENTITY = "study.journal", "study.json"
_PATIENCE = 120.0  # seconds to wait for the folder, which is locked while trials are added


class Trials(contextlib.ExitStack):
    """The trials in a study's folder, which all machines that work on it share.

    As a context it ends with nothing held.

    Args:
        folder: the folder.
        storage: URL of a database that replaces the journal, as in postgresql://user@host/name.
    """

    def __init__(self, folder: Path, storage: str | None = None) -> None:
        super().__init__()
        self.folder = folder
        self._held: dict[Path, contextlib.ExitStack] = {}
        with lock(folder, patience=_PATIENCE):
            self._study, self._storage = _open(folder, storage)

    def add(self, trials: Sequence[Trial]) -> None:
        """Add the trials that are not there yet, in this order. What a name stands for never changes."""
        with lock(self.folder, patience=_PATIENCE):
            there = self._by_name()
            planned = {name: str(one.user_attrs["config"]) for name, one in there.items()}
            for trial in trials:
                name, config = self._name(trial), settings_of(trial.config)
                if planned.setdefault(name, config) != config:
                    raise ValueError(
                        f"{self.folder} has planned {name} with other settings; give the options that it was "
                        "planned with, values further apart, or another folder with --out"
                    )
            for name, config in planned.items():
                if name not in there:
                    self._study.enqueue_trial({}, user_attrs={"run": name, "config": config})
        over = {name for name, one in there.items() if one.state.is_finished()}
        # Nothing is taken of what is done, but Optuna is told.
        self.take(trial for trial in trials if trial.is_done and self._name(trial) not in over)

    def take(self, wanted: Iterable[Trial]) -> Trial | None:
        """Hold the first of these trials that is not done and that nobody holds; None if there is none."""
        for trial in wanted:
            with contextlib.ExitStack() as held:
                try:
                    held.enter_context(lock(self.folder / ".claims" / self._name(trial), patience=0))
                except RunInUse:
                    continue
                self._record(trial)
                if not trial.is_done:  # another process may just have done it
                    self._held[trial.folder] = self.enter_context(held.pop_all())
                    return trial
        return None

    def release(self, trial: Trial) -> None:
        """End the hold of a trial."""
        self._record(trial)
        self._held.pop(trial.folder).close()

    def _record(self, trial: Trial) -> None:
        """Tell Optuna that a trial has begun, or how it ended, for those who look at it with its tools."""
        from optuna.trial import TrialState

        study_id = self._storage.get_study_id_from_name(self._study.study_name)
        known = self._by_name()[self._name(trial)]
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(study_id, known.number)
        if known.state == TrialState.WAITING:
            self._storage.set_trial_state_values(trial_id, TrialState.RUNNING)
        if trial.is_done and not known.state.is_finished():
            run = Run.open(trial.folder)
            if run.outcome == "finished" and run.last_loss is not None and math.isfinite(run.last_loss):
                self._storage.set_trial_state_values(trial_id, TrialState.COMPLETE, [run.last_loss])
            else:
                self._storage.set_trial_state_values(trial_id, TrialState.FAIL)

    def _by_name(self) -> dict[str, FrozenTrial]:
        return {one.user_attrs["run"]: one for one in self._study.get_trials(deepcopy=False)}

    def _name(self, trial: Trial) -> str:
        return str(trial.folder.resolve().relative_to(self.folder.resolve()))


def _open(folder: Path, url: str | None) -> tuple[Study, BaseStorage]:
    """The study of a folder in its journal or a database; made if there is none. The folder is locked."""
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
    except Exception as error:  # of the database's driver, or of a damaged journal
        way_out = f"remove {path}: the same command makes it again from the runs, and repeats none"
        if url is not None:
            way_out = "check --storage, as in postgresql://user@host/name; its driver is psycopg[binary]"
        raise ValueError(f"{url or path} cannot be read ({error}); {way_out}") from error
    if url is not None:
        _check_folder(folder, url, study)
    return study, storage


def _check_folder(folder: Path, url: str, study: Study) -> None:
    """Raise ValueError if a database has the study of another folder, or cannot serve this machine."""
    path = folder / _IDENTITY
    if not path.exists():
        here = {"identity": uuid.uuid4().hex, "machine": socket.gethostname()}
        durable.write(path, encode(here) + "\n")
    about = read_object(path, "restore it, or remove it and give another --storage")
    if url.startswith("sqlite") and about.get("machine") != socket.gethostname():
        raise ValueError(
            f"{url} is SQLite, which several machines cannot share safely, and the study began on "
            f"{about.get('machine')}; use the journal in the folder (no --storage), or PostgreSQL"
        )
    if "identity" not in study.user_attrs and not study.get_trials(deepcopy=False):
        study.set_user_attr("identity", about.get("identity"))
    if study.user_attrs.get("identity") != about.get("identity"):
        raise ValueError(
            f"{url} has a study {study.study_name} whose runs are not in {folder}; work on it in the folder "
            "that all its machines share, or name another with --out"
        )


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

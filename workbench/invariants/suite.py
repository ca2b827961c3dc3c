"""Checks: a class against its recorded reference, a member against its class."""

from dataclasses import dataclass
from pathlib import Path

from workbench.errors import UserError
from workbench.invariants import environment, record
from workbench.invariants.classes import InvariantClass
from workbench.invariants.compare import OTHER_HARDWARE, Comparison, Mismatch, Tolerance, compare
from workbench.invariants.report import save_picture
from workbench.invariants.session import MemberError, Session
from workbench.invariants.trajectory import Trajectory

RECORDED = "recorded"  # the row of the table in which the canonical run meets its reference file


@dataclass
class Suite:
    """Checks on the runs of a session.

    Args:
        session: makes the runs.
        device: whose references are met.
        pictures: folder of pictures of what differs; None draws none.
        strict: meet a reference to rounding on the hardware it was recorded on; False: everywhere as on other hardware.
    """

    session: Session
    device: str = "cpu"
    pictures: Path | None = None
    strict: bool = True

    def reference(self, cls: InvariantClass) -> record.Reference:
        """The class's reference file."""
        return record.read(record.path_of(cls.name, self.device))

    def is_home(self, reference: record.Reference) -> bool:
        """Whether this machine must meet the reference to rounding."""
        return self.strict and environment.is_same_hardware(reference.environment, environment.describe(self.device))

    def check_recorded(self, cls: InvariantClass) -> Comparison:
        """The canonical run, made here, against the reference file.

        Raises:
            Mismatch: they differ by more than rounding; on other hardware, by more than `OTHER_HARDWARE`.
        """
        reference = self.reference(cls)
        tolerance = cls.tolerance if self.is_home(reference) else OTHER_HARDWARE
        return self._hold(f"{cls.name}/{RECORDED}", self.session.canonical(cls), reference.trajectory, tolerance, None)

    def check_member(self, cls: InvariantClass, name: str) -> Comparison:
        """A member against what owns its class: the reference file on the hardware that it was recorded on, else the canonical
        run made here.

        Raises:
            Mismatch: they differ by more than rounding, or the member is refused, or ends in an error in other processes.
        """
        member = cls.members[name]
        try:
            ours = self.session.trajectory(cls, name)
        except (MemberError, UserError) as error:
            raise Mismatch(f"{cls.name}/{name}: {error}", Comparison([], [str(error)])) from None
        owner = self.session.base(cls, name) or self._owner(cls, name)
        return self._hold(f"{cls.name}/{name}", ours, owner, cls.tolerance, member.fields)

    def _owner(self, cls: InvariantClass, name: str) -> Trajectory:
        path = record.path_of(cls.name, self.device)
        if name != "repeat" and path.is_file() and self.is_home(reference := record.read(path)):
            return reference.trajectory
        return self.session.canonical(cls)

    def _hold(self, what: str, ours: Trajectory, theirs: Trajectory, tolerance: Tolerance, fields: object) -> Comparison:
        comparison = compare(ours, theirs, tolerance, fields)
        if comparison.same:
            return comparison
        message = comparison.message(what)
        if self.pictures is not None and ours.steps:
            message += f"\n  curves: {save_picture(comparison, ours, theirs, what, self.pictures)}"
        raise Mismatch(message, comparison)

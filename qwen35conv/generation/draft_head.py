"""What the gains of an mtp head say: in the shards or in a sidecar, it may differ from the trunk.

Four of its seven norms tell: the two before `fc`, whose sign splits raw from gamma at zero (raw averages -0.73 to
-0.16, gamma 0.27 to 0.84), and the two layer norms, split near 0.6. q and k overlap. So does the final norm: bundles
are known whose layer norms are raw and whose final norm is gamma, so it is checked by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from qwen35conv.generation.evidence import Weighed
from qwen35conv.generation.gains import NEGATIVE, OFF_GRID, GainLabel, GainStats, Role
from qwen35conv.generation.groups import Values

FINAL_FLOOR = 1.9  # a gamma final norm averages 2.25 and more, a raw one 1.25 to 2.58: above this, either
GAMMA_FINAL = 1.6  # no gamma final norm averages less
_PRE_FC = (Role.PRE_FC_EMBEDDING, Role.PRE_FC_HIDDEN)
_LAYER = (Role.INPUT, Role.POST)


def weigh_head(
    stats: Sequence[GainStats],
    *,
    trunk_is_raw: bool,
) -> Weighed:
    """What the head's gains say. The trunk never votes: a raw one only makes a raw final norm the likely reading."""
    voters = [s for s in stats if s.role in (*_PRE_FC, *_LAYER)]
    marks = [_mark(s) for s in voters]
    told = tuple(
        f"{s.name}: mean {s.mean:.3f}, {s.negative_share:.0%} negative: {'either' if m is None else m.value}"
        for s, m in zip(voters, marks, strict=True)
    )
    constant = bool(stats) and all(s.minimum == s.maximum for s in stats)

    def weighed(values: Values, why: str = "", warning: str = "", outliers: Sequence[str] = ()) -> Weighed:
        return Weighed(
            values=values,
            lean=None,
            constant=constant,
            doubted=False,
            n_anchors=len(voters),
            reasons=((why,) if why else ()) + told,
            outliers=tuple(outliers),
            warnings=(warning,) if warning else (),
        )

    if any(s.label is GainLabel.BROKEN for s in stats):
        return weighed(Values.BROKEN, "some gains of the head are not finite")
    if len(voters) < 2:
        return weighed(Values.WEAK, f"{len(voters)} of the head's four telling norms are here: too few to judge by")
    if constant:
        return weighed(Values.WEAK, "every gain of the head is one number throughout: untrained, or a broken export")
    seen = [m for m in marks if m is not None]
    if len(set(seen)) > 1:
        most = max(set(seen), key=seen.count)
        odd = [s.name for s, m in zip(voters, marks, strict=True) if m is not most]
        return weighed(Values.MIXED, "the head's norms disagree", outliers=odd)
    if None in marks:
        return weighed(Values.WEAK, "some of the head's norms could be either")
    values = seen[0]
    for final in (s for s in stats if s.role is Role.FINAL):
        negative = final.negative_share >= NEGATIVE / 2 and (final.off_grid_share > OFF_GRID or final.mean < 0.5)
        if values is not Values.DELTA and negative:
            why = f"{final.name} has negative entries, as only gamma - 1 has; the other norms have none"
            return weighed(Values.MIXED, why, outliers=(final.name,))
        if values is Values.GAMMA and final.mean < GAMMA_FINAL:
            why = f"{final.name} averages {final.mean:.2f}, as raw ones do (gamma: 2.25 and more); the others are gamma"
            return weighed(Values.MIXED, why, outliers=(final.name,))
        if values is Values.DELTA and not negative:
            what = f"{final.name} averages {final.mean:.2f} without negative entries: raw or gamma"
            if final.mean >= FINAL_FLOOR and not trunk_is_raw:
                why = f"{what}; bundles with raw layer norms and a gamma final norm are known"
                return weighed(Values.MIXED, why, outliers=(final.name,))
            return weighed(values, warning=f"{what}; taken for raw, as the other norms are")
    return weighed(values)


def _mark(s: GainStats) -> Values | None:
    """What one telling norm looks like; None if it could be either."""
    if s.label is GainLabel.UNDER or s.n < 2:
        return None
    if s.role in _PRE_FC:
        if s.mean < 0:
            return Values.DELTA
        if s.mean > 1.1 and s.below_one_share <= 0.05:
            return Values.TWICE
        return Values.GAMMA if s.mean > 0.1 and s.negative_share <= 0.05 else None
    if s.negative_share >= NEGATIVE and (s.mean < 0.2 or s.off_grid_share >= 0.01):
        return Values.DELTA
    if s.label is GainLabel.TWICE and s.mean >= 1.55:
        return Values.TWICE
    if s.mean >= 0.6:
        return Values.GAMMA
    return Values.DELTA if s.off_grid_share > OFF_GRID or s.label is GainLabel.CONST0 else None

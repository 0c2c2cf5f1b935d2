"""Methods whose sources leave gaps, which assumptions fill here: the authors' own methods may differ."""

from __future__ import annotations

from ..arguments import examines
from ..checks import check
from ..specs import Aggregate, Head, Provenance, Routing, Unit
from .hierarchical import residual_clip
from .parts import Clip, Drop, Excess, Identity, Level, Rollback
from .ratio_gate import RatioGate
from .token_level import pessimistic_clip

__all__ = ["apc", "fiberpo_domain", "mdpo", "p3o", "two_scale"]


@examines
def apc(delta: float = 0.1) -> RatioGate:
    """APC-Obj, aggregational policy censoring: ``loss_t = -A (1 + clip(r - 1, -B, B))``, B the part of a budget of
    deviations that the other tokens of the trajectory leave (arXiv 2603.08239, definition 3.2 as a reproduction quotes
    it).

    ``B_t = max(n delta - sum_{u != t} |r_u - 1|, 0)``, n the trajectory's tokens, is differentiated too. So while the
    mean of ``|r - 1|`` is at most ``delta`` the objective is ``r A``; beyond, each deviation shrinks by the excess of
    their sum over ``n delta``, and vanishes where it is smaller. The rest of token t then has no gradient through
    t's own ratio, only through those of the others: each may move towards 1 in favour of the rest.

    Args:
        delta: of the mean deviation. No number could be verified; 0.1 is that of the worked example.

    Assumed: tokens of the same state, of which the definition speaks, are those of the same trajectory.

    Traps: the excess is a sum. At n = 4096 and delta = 0.1, a mean of 0.101 takes 4 off every deviation: the whole
    trajectory is censored at once. Aggregate by ``aggregation.seq_mean_token_mean``. In sums a deviation counts for at
    most 2048.

    >>> apc().first_order.name
    'EXACT'
    """
    level = Level(Excess(delta), aggregate=Aggregate.SUM)
    return RatioGate(
        "apc", Drop(), (level,), Head.CENSORED, source="arXiv 2603.08239", provenance=Provenance.RECONSTRUCTED
    )


@examines
def fiberpo_domain(
    log_clip: float = 0.2,
    trajectory: float = 0.2,
    group: float = 0.1,
    domain: float = 0.1,
    slope: float | None = 1.0,
    routing: Routing = Routing.THROUGH,
) -> RatioGate:
    """FiberPO over four levels, token < trajectory < prompt group < domain, each with a budget of its own.

    Every level gates its residual, the aggregate minus that of the next coarser level, per channel (arXiv 2603.08239;
    the full text is not available: this generalises the two-level method, to which it reduces).

    Args:
        log_clip, trajectory, group, domain: log-ratio budgets. No paper gives numbers.
        slope: of every rollback. 1: a group has so many tokens that the paper's slope, their number, would be a wall;
            None asks for it.
        routing: how groups and domains carry gradient; ``Routing.STOPPED`` where they span micro-batches.

    >>> [level.unit.name for level in fiberpo_domain().levels]
    ['TRAJECTORY', 'GROUP', 'DOMAIN']
    """
    levels = (
        Level(Rollback((trajectory, trajectory), slope)),
        Level(Rollback((group, group), slope), routing, Unit.GROUP),
        Level(Rollback((domain, domain), slope), routing, Unit.DOMAIN),
    )
    return RatioGate(
        "fiberpo_domain", residual_clip(log_clip), levels, split=True, source="arXiv 2603.08239",
        provenance=Provenance.RECONSTRUCTED,
    )  # fmt: skip


@examines
def mdpo(tau: float = 0.1) -> RatioGate:
    """MDPO, mirror descent with the exact divergence: ``loss_t = -(A r - tau (r x - r + 1))`` (defined in arXiv
    2005.09814).

    ``r x - r + 1`` with samples of the old policy estimates KL(new || old) without bias and is never negative. The
    gradient is ``-w r (A - tau x)``; :func:`dro` and :func:`kimi` are its approximations near r = 1.

    Args:
        tau: 0.1, as Kimi's. The authors' code anneals it, ``1 / (1 - progress)`` from 1 on, and has the divergence of
            the two distributions where a sample of the old policy stands here.

    >>> mdpo().head.name
    'MIRROR'
    """
    return RatioGate(
        "mdpo", Identity(), head=Head.MIRROR, head_numbers=(tau, tau), source="arXiv 2005.09814",
        provenance=Provenance.RECONSTRUCTED,
    )  # fmt: skip


@examines
def p3o(eps: float = 0.2) -> RatioGate:
    """P3O, pairwise PPO with a joint clip: ``loss_t = -sg[clip(W)] A logp``, W the product of all token ratios of the
    two answers of a pair (arXiv 2310.00212, V2; read in other people's summaries).

    The gradient of a pair is ``-w clip(W) (R_1 - R_2) / 2`` times that of ``log pi(y_1) - log pi(y_2)``. The pair is
    the group: give the batch ``group_ids`` with two rows each, and as advantages ``+-(R_1 - R_2) / 2``, which is
    ``advantages.dr_grpo(rewards, group_ids)``.

    Args:
        eps: on W. No number could be verified; 0.2 is PPO's.

    Assumed: the clip holds W within ``[1 - eps, 1 + eps]`` whatever the sign of A, and is a constant. V1, which
    clips the ratio of each answer before they are multiplied, is not given: how was not to be found out, and a product
    of clipped ratios is no level.

    Traps: weights are per row: ``aggregation.seq_mean_token_sum(batch)`` gives half the mean over pairs. With more than
    two rows in a group the product is over all of them. A pair must not be cut into micro-batches.

    >>> p3o().levels[0].unit.name
    'GROUP'
    """
    check(0 <= eps < 1, "eps: expected a number in [0, 1), got {}", eps)
    low, high = 1.0 - eps, 1.0 + eps
    pair = Level(Clip((low, low), (high, high)), Routing.STOPPED, Unit.GROUP, Aggregate.SUM)
    return RatioGate("p3o", Drop(), (pair,), Head.SCORE, source="arXiv 2310.00212", provenance=Provenance.RECONSTRUCTED)


@examines
def two_scale(
    step: tuple[float, float] = (0.2, 0.2), trajectory: tuple[float, float] = (0.1, 0.1), token: float | None = None
) -> RatioGate:
    """A pessimistic clip on the step's residual ratio and one on the trajectory's, their product being the ratio.

    ``z = g_T(a_step - a_traj) + g_S(a_traj)``, and with ``token`` also ``g_0(x - a_step)``: where nothing is clipped, z
    is the step's mean log-ratio, or the token's own. One-sided clips at every level keep PPO's lower bound:
    ``A e^z <= A e^x`` with ``token``.

    Args:
        step, trajectory: epsilons (low, high) of either level.
        token: the epsilon of the token's residual. None: the residual is dropped, as in GSPO.

    >>> two_scale().levels[1].unit.name
    'TRAJECTORY'
    """
    levels = (Level(pessimistic_clip(*step), unit=Unit.STEP), Level(pessimistic_clip(*trajectory)))
    residual = Drop() if token is None else pessimistic_clip(token, token)
    return RatioGate("two_scale", residual, levels, source="hpo_core", provenance=Provenance.RECONSTRUCTED)

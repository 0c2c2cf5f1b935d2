"""Few gates that have, between them, whatever makes a kernel take a way of its own.

Every run tries each promise with these on every backend, and `make test-long` with the whole catalogue. Each gate of
the catalogue is held to its definition on every backend in any run: test_presets.py, test_hierarchy.py, test_gates.py
and test_terms.py. test_promises.py shows that nothing is missing of what Triton's kernels are compiled for.
"""

from catalogue import CATALOGUE, FIRSTS

from hpo_core.specs import TermSpec

# Gates with which mutants are killed, and those that alone make a kernel what facts do not tell.
ALWAYS = (
    "preset: ppo_clip",
    "hierarchy: score",
    "hierarchy: balanced, 4 levels, through, split",
    "hierarchy: mean exp, 4 levels, through, split",
    "hierarchy: fiberpo_domain, stopped",
)


def facts_of(gate):
    """The parts with a path of their own through a kernel, alone and together: a promise that one of them breaks is
    broken by any gate with it."""
    spec = gate.spec()
    found = {
        ("token", spec.token, spec.head, bool(spec.levels)), ("driven", spec.low_driven, spec.high_driven),
        ("strict", spec.strict), ("depth", len(spec.levels), spec.split), ("first order", gate.first_order),
        ("takes", gate.takes_bounds, gate.takes_target, gate.reads_rollout),
        *(("required", name) for name in gate.required),
    }  # fmt: skip
    for place, level in enumerate(spec.levels):
        found |= {
            ("routing", place, level.routing), ("aggregate", place, level.aggregate),
            ("level", level.gate, level.unit), ("level", level.gate, level.aggregate),
            ("aggregate", level.aggregate, level.unit), ("aggregate", level.aggregate, spec.split),
            ("routing", level.routing, level.aggregate), ("routing", level.routing, spec.split),
            ("routing", level.routing, spec.head), ("routing", level.routing, spec.token),
        }  # fmt: skip
    if spec.term is not None:
        found |= {("penalty", spec.term.penalty)}
        found |= {("given", name) for name, value, unset in zip(spec.term._fields, spec.term, TermSpec(), strict=True)
                  if value != unset}  # fmt: skip
    for each in gate.corrections:
        rule = each.spec()
        found |= {("correction", rule.statistic, rule.reduction, rule.action, rule.of_segments)}
        found |= {("of", each.unit, each.channel)}
    return found


def cover():
    """First gates of structures that have every fact: each time the one with the most of those that are left."""
    facts = {name: facts_of(gate) for name, gate in CATALOGUE.items() if name in FIRSTS}
    chosen = list(ALWAYS)
    left = set().union(*facts.values()).difference(*(facts[name] for name in chosen))
    while left:
        chosen.append(max(facts, key=lambda name: len(facts[name] & left)))
        left -= facts[chosen[-1]]
    return chosen


COVER = cover()

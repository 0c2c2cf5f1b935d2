"""Every error of policy_loss and of policy_loss_and_grad names the argument and the fix."""

import pytest
import torch
from loss_examples import TOKENS, Example

import hpo_core as hpo
from hpo_core import entropy, gates, kl


def error_cases():
    example = Example()
    batch, logp, mask = example.batch, example.logp, example.mask
    window = entropy.forking_tokens()
    state = window.fit(example.entropy, batch)
    stepped = hpo.PackedBatch.from_lengths([2, 2], cu_steps=torch.tensor([0, 1, 2, 4]))
    padded = {
        "logp": torch.zeros(2, 3),
        "old_logp": None,
        "advantages": torch.ones(2),
        "batch": torch.ones(2, 3).bool(),
    }
    elsewhere, ids, given = torch.zeros(TOKENS, device="meta"), torch.arange(TOKENS), gates.GateInputs
    selecting = {"window": window, "entropy": example.entropy, "threshold": state}
    of_domains = gates.RatioGate("own", gates.Identity(), (gates.Level(gates.Tanh(0.1), unit=gates.Unit.DOMAIN),))
    return [
        # logp
        ({"logp": [0.0]}, TypeError, "logp: expected a tensor [T], got <class 'list'>"),
        ({"logp": logp[:5]}, ValueError, "logp: expected shape [T] (one per token of the batch) = [12], got [5]"),
        (
            {**padded, "logp": torch.zeros(3, 2)},
            ValueError,
            "logp: expected shape [B, L] (that of the padded batch) = [2, 3]",
        ),
        ({"logp": logp.half()}, TypeError, "logp: expected float32, got float16; 16-bit rounding"),
        ({"logp": logp.bfloat16()}, TypeError, "1.6e-2 a token"),
        ({"logp": logp.bfloat16()}, TypeError, "logits.float() before log_softmax"),
        (
            {"logp": logp.double()},
            TypeError,
            "logp: expected float32, got float64; use .float(), or backend='reference'",
        ),
        ({"logp": torch.zeros(TOKENS, dtype=torch.int64)}, TypeError, "logp: expected float32, got int64"),
        ({"logp": elsewhere}, ValueError, "device cpu (that of the batch), got meta; use batch.to('meta')"),
        # constants
        ({"old_logp": logp[:5]}, ValueError, "old_logp: expected shape [T] (that of logp) = [12], got [5]"),
        ({"old_logp": logp.bfloat16()}, TypeError, "old_logp: expected float32, got bfloat16; 16-bit rounding"),
        ({"logp": logp.to(torch.float8_e5m2)}, TypeError, "logp: expected float32, got float8_e5m2; 16-bit rounding"),
        ({"old_logp": logp.to(torch.float8_e5m2)}, TypeError, "old_logp: expected float32, got float8_e5m2; 16-bit"),
        ({"old_logp": ids}, TypeError, "old_logp: expected dtype float32, got int64; are these ids of tokens?"),
        ({"kl": kl.k3(0.1), "ref_logp": ids}, TypeError, "ref_logp: expected dtype float32, got int64; are these ids"),
        ({"rollout_logp": ids, "gate": gates.tis()}, TypeError, "rollout_logp: expected dtype float32, got int64; are"),
        ({"entropy": ids}, TypeError, "entropy: expected dtype float32, got int64; are these ids of tokens?"),
        ({"old_logp": elsewhere}, ValueError, "device cpu (that of logp), got meta; use old_logp.to('cpu')"),
        ({"old_logp": 0.0}, TypeError, "old_logp: expected a tensor [T] (that of logp), got <class 'float'>"),
        (
            {"old_logp": logp.clone().requires_grad_()},
            ValueError,
            "old_logp: it is a constant of the loss but requires a gradient; pass old_logp.detach(), and as logp the",
        ),
        ({"token_mask": logp}, TypeError, "token_mask: expected dtype bool, got float32"),
        ({"token_weight": mask}, TypeError, "token_weight: expected dtype float32, got bool"),
        ({"token_weight": logp[:5]}, ValueError, "token_weight: expected shape"),
        ({"weights": torch.ones(3)}, ValueError, "weights: expected shape [S] (one per row) = [4], got [3]"),
        ({"weights": 0.5}, TypeError, "weights: expected a tensor [S] (one per row), got <class 'float'>"),
        ({"weights": torch.ones(4).half()}, TypeError, "weights: expected float32, got float16; 16-bit rounding"),
        ({"entropy": logp[:5]}, ValueError, "entropy: expected shape"),
        ({"entropy": logp.clone().requires_grad_()}, ValueError, "entropy: it is a constant of the loss but requires"),
        (
            {"rollout_logp": logp.bfloat16(), "gate": gates.tis()},
            TypeError,
            "rollout_logp: expected float32, got bfloat16; 16-bit rounding",
        ),
        # batch, gate
        (
            {"batch": [4, 3, 0, 5]},
            TypeError,
            "batch: expected a PackedBatch or a mask [B, L], got <class 'list'>; PackedBatch.from_lengths(",
        ),
        (
            {"batch": mask},
            ValueError,
            "batch: expected a PackedBatch or a mask [B, L], got a tensor [12]; PackedBatch.from_",
        ),
        ({"batch": torch.nested.nested_tensor([mask])}, TypeError, "batch: expected a dense tensor, got a nested"),
        ({"gate": "ppo"}, TypeError, "gate: expected a RatioGate such as gates.dapo(), got 'ppo'"),
        # what some gates are given
        ({"gate_inputs": given(bounds=logp)}, TypeError, "bounds: expected a pair (low, high)"),
        ({"gate_inputs": given(bounds=(logp[:5], None))}, ValueError, "bounds[0]: expected shape"),
        ({"gate_inputs": given(bounds=(None, elsewhere))}, ValueError, "bounds[1]: expected device"),
        (
            {"gate_inputs": given(bounds=(logp, None)), "gate": gates.gspo()},
            ValueError,
            "bounds: the gate 'gspo' has no token clip",
        ),
        (
            {"gate_inputs": given(bounds=(logp, logp)), "gate": gates.RatioGate("open", gates.Clip())},
            ValueError,
            "bounds: the gate 'open' has no token clip with bounds for them to replace",
        ),
        # levels and corrections
        ({"gate": of_domains}, ValueError, "domain_ids: the gate has a level or correction of domains"),
        (
            {"gate": gates.mis(unit=gates.Unit.DOMAIN), "rollout_logp": logp},
            ValueError,
            "domain_ids: the gate has a level or correction of domains, and the batch has none; pass domain_ids [S]",
        ),
        # penalty
        ({"kl": kl.k3(0.1)}, ValueError, "kl: expected ref_logp beside it, got none"),
        ({"ref_logp": logp}, ValueError, "ref_logp: expected a penalty beside it, got none"),
        ({"kl": 0.1, "ref_logp": logp}, TypeError, "kl: expected a penalty such as hpo_core.kl.k3(beta), got 0.1"),
        ({"kl": kl.k3(0.1), "ref_logp": logp.half()}, TypeError, "ref_logp: expected float32, got float16; 16-bit"),
        # window
        ({"window": window}, ValueError, "entropy: a window needs the entropies [T]; pass entropy="),
        (
            {"window": window, "entropy": example.entropy},
            ValueError,
            "threshold: the window 'forking_tokens' selects over the whole batch; pass threshold=window.fit(",
        ),
        ({"threshold": state}, ValueError, "threshold: given without a window"),
        (
            {**selecting, "threshold": torch.ones(2)},
            ValueError,
            "threshold: expected shape [1] (as window.fit returned it)",
        ),
        ({**selecting, "threshold": 0.5}, TypeError, "threshold: expected a tensor [1]"),
        ({**selecting, "threshold": state.to("meta")}, ValueError, "threshold: expected device cpu"),
        ({**selecting, "window": 0.2}, TypeError, "window: expected one of hpo_core.entropy, got 0.2"),
        ({**selecting, "entropy": example.entropy.half()}, TypeError, "entropy: expected dtype float32 or float64"),
        # what this gate does not read
        ({"rollout_logp": logp}, ValueError, "rollout_logp: the gate 'ppo_clip' does not read"),
        (
            {"process_group": torch.distributed.ProcessGroup(0, 1)},
            ValueError,
            "process_group: no level and no correction of the gate 'ppo_clip' spans ranks",
        ),
        # advantages
        ({"advantages": [1.0]}, TypeError, "advantages: expected a tensor [S], got <class 'list'>"),
        (
            {"advantages": torch.ones(7)},
            ValueError,
            "advantages: expected shape [S] (one per row) = [4], got [7]; "
            "or say advantage_level='token' ([12]), 'trajectory', 'group' or 'domain'",
        ),
        ({"advantages": torch.ones(4, 1)}, ValueError, "expected shape [S] (one per row) = [4], got [4, 1]"),
        ({"advantages": mask, "advantage_level": "token"}, TypeError, "advantages: expected dtype float32, got bool"),
        ({"advantages": torch.ones(4, requires_grad=True)}, ValueError, "advantages: it is a constant of the loss"),
        ({"advantages": torch.ones(4, device="meta")}, ValueError, "advantages: expected device cpu"),
        ({"advantage_level": "tokens"}, ValueError, "advantage_level: expected one of token, step, row"),
        (
            {"advantage_level": "token"},
            ValueError,
            "advantages: expected shape [T] (one per token of the batch) = [12], got [4]",
        ),
        ({"advantage_level": "step"}, ValueError, "advantage_level: 'step' needs"),
        (
            {"advantage_level": "trajectory"},
            ValueError,
            "advantage_level: 'trajectory' needs trajectory_ids in the batch",
        ),
        ({"advantage_level": "domain"}, ValueError, "advantage_level: 'domain' needs domain_ids in the batch"),
        (
            {"advantages": torch.ones(2, 2), "advantage_level": "group"},
            ValueError,
            "advantages: expected one per group, got shape [2, 2]",
        ),
        (
            {"logp": torch.zeros(4), "old_logp": None, "batch": stepped, "advantages": torch.ones(5)},
            ValueError,
            "(one per row) = [2], got [5]; or say advantage_level='token' ([4]), 'step' ([3]), 'trajectory'",
        ),
        ({"report": True}, ValueError, "report: expected some of ('tokens', 'levels', 'corrections'), as in"),
        # backend
        ({"backend": "gpu"}, ValueError, "backend: expected one of reference, cpu"),
    ]


@pytest.mark.parametrize(("keywords", "error", "message"), error_cases())
@pytest.mark.parametrize(
    "function", [hpo.policy_loss, hpo.policy_loss_and_grad], ids=lambda function: function.__name__
)
def test_errors_name_argument_expectation_value_and_fix(function, keywords, error, message):
    with pytest.raises(error) as raised:
        function(**Example().arguments(**keywords))
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"windw": 3}, "windw: {} has no such argument; did you mean 'window'?"),
        ({"xyz": 3}, "xyz: {} has no such argument; it takes "),
        ({"score": torch.zeros(4)}, "score: {} has no such argument; it takes "),
        ({"_score": torch.zeros(4)}, "_score: {} has no such argument"),  # the name that the function inside has for it
    ],
)
def test_an_unknown_keyword_is_one_of_the_public_function(keywords, message):
    logp, of_rows = torch.zeros(4), torch.ones(2)
    batch = hpo.PackedBatch.from_lengths([2, 2], group_ids=torch.zeros(2, dtype=torch.int64))
    calls = {
        hpo.policy_loss_and_grad: (logp, None, of_rows, batch),
        hpo.hierarchical_policy_loss: (logp, None, of_rows, batch),
        hpo.policy_loss_from_logits: (torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64), None, of_rows, batch),
    }
    for function, arguments in calls.items():
        with pytest.raises(TypeError) as raised:
            function(*arguments, **keywords)
        assert str(raised.value).startswith(message.format(function.__name__))

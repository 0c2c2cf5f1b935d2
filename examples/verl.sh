#!/bin/sh
# GSPO with leave-one-out advantages in verl 0.9.1, on one node; log-probabilities come from hidden states.
#
#   pip install "verl[verl-core]==0.9.1" vllm .    # in a checkout of hpo_core
#   DATA=~/data/gsm8k MODEL=Qwen/Qwen2.5-0.5B-Instruct GPUS=1 sh examples/verl.sh trainer.total_epochs=1
#
# DATA has train.parquet and test.parquet as verl's examples/data_preprocess/gsm8k.py writes them. Options that follow
# win over those below. docs/verl.md has the other losses and estimators, docs/cluster.md more than one node.
set -eu

exec python -m verl.trainer.main_ppo \
    data.train_files="${DATA:-$HOME/data/gsm8k}/train.parquet" \
    data.val_files="${DATA:-$HOME/data/gsm8k}/test.parquet" \
    data.train_batch_size=256 \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    actor_rollout_ref.model.path="${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}" \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.model.use_fused_kernels=True \
    actor_rollout_ref.model.fused_kernel_options.impl_backend=hpo_core \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.actor.policy_loss.loss_mode=hpo_gspo \
    actor_rollout_ref.actor.clip_ratio_low=3e-4 \
    actor_rollout_ref.actor.clip_ratio_high=4e-4 \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=16384 \
    algorithm.adv_estimator=hpo_rloo \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node="${GPUS:-1}" \
    trainer.logger='["console"]' \
    "$@"

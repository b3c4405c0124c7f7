"""The names of vLLM that this room uses, few of which vLLM promises to keep: an upgrade begins with this list.

`tests/vllm_engine/test_relied_on.py` reads the room's syntax trees: a name that is used and not listed fails, and one
that is listed and not used. What a model's layers use is listed by its family.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

CHECKED_VLLM = "0.30.0"
"""The version that `pyproject.toml` pins."""

Names = Mapping[str, Sequence[str]]
"""By `module:name`, what is used of it: methods that we call or override, attributes that we read or set."""

EVERYWHERE: Names = {
    "vllm:SamplingParams": ("extra_args", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    "vllm:__version__": (),
    "vllm._custom_ops:apply_repetition_penalties": (),
    "vllm.config:CUDAGraphMode": ("FULL",),
    "vllm.config:CompilationMode": ("NONE",),
    "vllm.config:SchedulerConfig": ("long_prefill_token_threshold", "max_num_batched_tokens"),
    "vllm.config:VllmConfig": ("additional_config", "model_config", "scheduler_config"),
    "vllm.config:set_current_vllm_config": (),
    "vllm.distributed.parallel_state:get_tp_group": (),
    "vllm.engine.arg_utils:AsyncEngineArgs": ("create_engine_config",),
    "vllm.exceptions:VLLMClientError": (),
    "vllm.exceptions:VLLMValidationError": ("parameter",),
    "vllm.forward_context:BatchDescriptor": ("num_tokens",),
    "vllm.forward_context:set_forward_context": (),
    "vllm.logprobs:Logprob": ("decoded_token", "logprob", "rank"),
    "vllm.outputs:CompletionOutput": ("finish_reason", "logprobs", "stop_reason", "token_ids", "text"),
    "vllm.outputs:RequestOutput": ("num_cached_tokens", "outputs", "prompt_token_ids"),
    "vllm.platforms:current_platform": ("is_cpu", "is_cuda_alike"),
    "vllm.renderers.inputs.preprocess:parse_model_prompt": (),
    "vllm.sampling_params:RequestOutputKind": ("DELTA",),
    "vllm.sampling_params:SamplingType": ("RANDOM_SEED",),
    "vllm.v1.core.kv_cache_manager:KVCacheBlocks": (),
    "vllm.v1.core.kv_cache_manager:KVCacheManager": ("block_pool", "enable_caching", "truncate_computed_blocks"),
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler": (),
    "vllm.v1.core.sched.output:CachedRequestData": ("num_computed_tokens", "req_ids", "resumed_req_ids"),
    "vllm.v1.core.sched.output:NewRequestData": ("num_computed_tokens", "req_id"),
    "vllm.v1.core.sched.output:SchedulerOutput": (
        "finished_req_ids",
        "num_scheduled_tokens",
        "preempted_req_ids",
        "scheduled_cached_reqs",
        "scheduled_new_reqs",
        "total_num_scheduled_tokens",
    ),
    "vllm.v1.core.sched.scheduler:Scheduler": (
        "_free_request",
        "_get_local_prefix_cache_hit",
        "_update_request_with_output",
        "add_request",
        "get_num_unfinished_requests",
        "hash_block_size",
        "kv_cache_manager",
        "max_model_len",
        "max_num_scheduled_tokens",
        "num_lookahead_tokens",
        "requests",
        "running",
        "schedule",
        "scheduler_config",
        "skipped_waiting",
        "update_from_output",
        "vllm_config",
        "waiting",
    ),
    "vllm.v1.engine:EngineCoreOutput": (
        "finish_reason",
        "new_token_ids",
        "pooling_output",
        "prefill_stats",
        "request_id",
    ),
    "vllm.v1.engine:EngineCoreRequest": ("external_req_id", "request_id"),
    "vllm.v1.engine:EngineCoreOutputs": (),
    "vllm.v1.engine:async_llm": ("OutputProcessor",),
    "vllm.v1.engine.async_llm:AsyncLLM": (
        "abort",
        "check_health",
        "engine_core",
        "errored",
        "from_engine_args",
        "generate",
        "input_processor",
        "model_config",
        "output_handler",
        "output_processor",
        "renderer",
        "shutdown",
        "vllm_config",
    ),
    "vllm.v1.engine.core:EngineCore": ("scheduler",),
    "vllm.v1.engine.exceptions:EngineDeadError": (),
    "vllm.v1.engine.exceptions:EngineGenerateError": (),
    "vllm.v1.engine.input_processor:InputProcessor": ("generation_config_fields",),
    "vllm.v1.engine.output_processor:OutputProcessor": ("process_outputs", "request_states"),
    "vllm.v1.engine.output_processor:OutputProcessorOutput": (),
    "vllm.v1.engine.output_processor:RequestState": ("sent_tokens_offset", "stream_interval"),
    "vllm.v1.executor:Executor": ("collective_rpc", "get_class", "shutdown"),
    "vllm.v1.executor.uniproc_executor:UniProcExecutor": (),
    "vllm.v1.outputs:AsyncModelRunnerOutput": ("get_output",),
    "vllm.v1.outputs:LogprobsTensors": (),
    "vllm.v1.outputs:ModelRunnerOutput": ("pooler_output", "req_ids"),
    "vllm.v1.outputs:SamplerOutput": (),
    "vllm.v1.request:Request": (
        "block_hashes",
        "max_tokens",
        "next_decode_eligible_step",
        "num_computed_tokens",
        "num_output_tokens",
        "num_tokens",
        "request_id",
        "sampling_params",
        "skip_reading_prefix_cache",
    ),
    "vllm.v1.sample.metadata:SamplingMetadata": (
        "bad_words_token_ids",
        "frequency_penalties",
        "no_penalties",
        "output_token_ids",
        "presence_penalties",
        "repetition_penalties",
    ),
    "vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p": (),
    "vllm.v1.sample.sampler:Sampler": ("apply_penalties", "topk_topp_sampler"),
    "vllm.v1.utils:CpuGpuBuffer": ("cpu", "gpu", "np"),
    "vllm.v1.worker.gpu_input_batch:CachedRequestState": ("mrope_position_delta", "mrope_positions", "req_id"),
    "vllm.v1.worker.gpu_input_batch:InputBatch": (
        "bad_words_token_ids",
        "block_table",
        "generators",
        "logprob_token_ids",
        "num_computed_tokens_cpu",
        "num_logprobs",
        "num_prompt_tokens",
        "num_reqs",
        "req_ids",
        "sampling_metadata",
        "temperature_cpu",
        "top_k_cpu",
        "top_p_cpu",
    ),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": (
        "_build_attention_metadata",
        "_determine_batch_execution_and_padding",
        "_gather_mm_embeddings",
        "_get_or_create_async_output_copy_stream",
        "_get_slot_mappings",
        "_init_model_kwargs",
        "_init_mrope_positions",
        "_model_forward",
        "_preprocess",
        "_sample",
        "_update_states",
        "device",
        "discard_request_mask",
        "execute_model_state",
        "get_model",
        "input_batch",
        "input_ids",
        "inputs_embeds",
        "load_model",
        "max_num_reqs",
        "model",
        "model_config",
        "mrope_positions",
        "optimistic_seq_lens_cpu",
        "positions",
        "query_start_loc",
        "requests",
        "sample_tokens",
        "sampler",
        "seq_lens",
        "uses_mrope",
        "vllm_config",
    ),
    "vllm.v1.worker.gpu_model_runner:ExecuteModelState": ("hidden_states", "scheduler_output"),
    "vllm.v1.worker.gpu_worker:Worker": ("init_device", "load_model", "model_config", "model_runner"),
}
"""Of every stage on every device. A worker on a CPU is a `gpu_worker.Worker` too."""

ON_CPU: Names = {
    "vllm.v1.worker:cpu_worker": ("CPUModelRunner",),
    "vllm.v1.worker.cpu_model_runner:CPUModelRunner": (),
    "vllm.v1.worker.cpu_worker:CPUWorker": (),
}
"""Not imported beside a CUDA runner, see `worker/ar_model_runner.py`."""

ON_CUDA: Names = {"vllm.v1.worker:gpu_model_runner": ("GPUModelRunner",)}

LOOKED_UP: Names = {
    "vllm.v1.core.sched.scheduler:Scheduler.schedule": ("next_decode_eligible_step",),
    "vllm.v1.engine.async_llm:AsyncLLM.__init__": ("OutputProcessor",),
    "vllm.v1.sample.sampler:Sampler.apply_logits_processors": ("apply_penalties",),
    "vllm.v1.sample.sampler:Sampler.sample": ("topk_topp_sampler",),
    "vllm.v1.worker.gpu_worker:Worker.init_device": ("GPUModelRunner",),
}
"""What is replaced or set, by the function of vLLM's that has to look there for it."""

ADDED: Names = {
    "vllm.v1.core.sched.output:SchedulerOutput": ("omni_further", "omni_rows"),
    "vllm.v1.engine.core:EngineCore": ("omni_counts", "omni_push_rows"),
}
"""Names of our own on objects of vLLM's."""

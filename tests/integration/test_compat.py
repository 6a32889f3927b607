"""Every patch in ``vllm_arm_cpu/compat`` is still needed, and still fits what it replaces.

vLLM's source is read, not its objects: other tests of this process have
patched those. A test that fails here after moving to another vLLM says that a
patch can go, or must follow.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import vllm
from vllm.platforms.interface import Platform

import vllm_arm_cpu

VLLM = Path(vllm.__file__).parent
COMPAT = Path(vllm_arm_cpu.__file__).parent / "compat"
PATCHES = sorted(path.stem for path in COMPAT.glob("*.py") if path.stem != "__init__")


class Source:
    """One of vLLM's files."""

    def __init__(self, path: str) -> None:
        self.text = (VLLM / path).read_text()
        self.tree = ast.parse(self.text)

    def function(self, name: str) -> str:
        """Source of a function, or of a method given as ``Class.method``; without its docstring and comments."""
        return ast.unparse(self._find(name))

    def parameters(self, name: str) -> list[str]:
        """Names of a function's parameters, in order."""
        arguments = self._find(name).args
        return [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]

    def imports(self) -> set[str]:
        """Names that the module imports at its top level from other modules."""
        return {
            alias.asname or alias.name
            for node in self.tree.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }

    def _find(self, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef:
        body: list[ast.stmt] = self.tree.body
        *classes, function = name.split(".")
        for class_name in classes:
            body = next(node.body for node in body if isinstance(node, ast.ClassDef) and node.name == class_name)
        functions = (node for node in body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
        found = next((node for node in functions if node.name == function), None)
        assert found is not None, f"vLLM has no {name} any more"
        if ast.get_docstring(found) is not None:
            found.body = found.body[1:]
        return found


def own_parameters(function: FunctionType) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_linear_dispatch() -> None:
    """Linear and embedding layers ask one function, by its name at that moment, and no platform."""
    utils = Source("model_executor/layers/utils.py")
    assert utils.parameters("dispatch_cpu_unquantized_gemm") == ["layer", "remove_weight"]
    for path, method, remove in [
        ("linear.py", "UnquantizedLinearMethod.process_weights_after_loading", True),
        ("vocab_parallel_embedding.py", "UnquantizedEmbeddingMethod.process_weights_after_loading", False),
    ]:
        caller = Source(f"model_executor/layers/{path}").function(method)
        # Imported where it is called: replacing it in its own module reaches both.
        assert "from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm" in caller
        assert f"dispatch_cpu_unquantized_gemm(layer, remove_weight={remove})" in caller
    asked = set(re.findall(r"current_platform\.(\w+)", utils.function("dispatch_cpu_unquantized_gemm")))
    assert asked <= {"is_zen_cpu", "get_cpu_architecture"}, "it asks the platform: is that a hook?"
    hooks = [name for name in dir(Platform) if re.search("linear|unquantized", name)]
    assert hooks == [], "the platform has a hook for linear layers now"


def test_sampler_ops() -> None:
    """Both methods call an operator of ``vllm._C`` on every CPU platform."""
    from vllm_arm_cpu.sampling import rejection, sampler

    upstream = Source("v1/sample/sampler.py")
    greedy = upstream.function("Sampler.greedy_sample")
    assert re.search(r"is_cpu\(\):\s+return torch\.ops\._C\.greedy_argmax\(logits\)", greedy)
    assert "@staticmethod" in greedy
    assert upstream.parameters("Sampler.greedy_sample") == own_parameters(sampler.greedy_sample)

    random = Source("v1/sample/ops/topk_topp_sampler.py")
    assert "torch.ops._C.fused_gumbel_argmax(" in random.function("TopKTopPSampler.forward_cpu")
    assert "self.forward = self.forward_cpu" in random.function("TopKTopPSampler.__init__")
    assert random.parameters("TopKTopPSampler.forward_cpu") == own_parameters(sampler.top_k_top_p_sample)

    # The others are torch operations, for whatever platform.
    for name, own in (
        ("Sampler.sample", sampler.sample),
        ("Sampler.apply_logits_processors", sampler.apply_logits_processors),
        ("Sampler.compute_logprobs", sampler.compute_logprobs),
        ("Sampler.gather_logprobs", sampler.gather_logprobs),
    ):
        assert upstream.parameters(name) == own_parameters(own)
        assert "current_platform" not in upstream.function(name)
    # The mask of allowed tokens comes first.
    processors = upstream.function("Sampler.apply_logits_processors")
    masked = processors.index("logits.masked_fill_(sampling_metadata.allowed_token_ids_mask, float('-inf'))")
    assert not re.search(r"apply_bad_words\(|processor\.apply|apply_penalties", processors[:masked])
    sample = upstream.function("Sampler.sample")
    assert "for processor in sampling_metadata.logitsprocs.argmax_invariant" in sample
    # What min-p leaves goes straight into the filters.
    between = sample.partition("processor.apply(logits)")[2]
    assert between.lstrip().startswith("random_sampled, processed_logprobs = self.topk_topp_sampler(logits,")
    min_p = Source("v1/sample/logits_processor/builtin.py")
    assert "torch.nn.functional.softmax(logits, dim=-1)" in min_p.function("MinPLogitsProcessor.apply")
    assert min_p.parameters("MinPLogitsProcessor.apply") == own_parameters(sampler.apply_min_p)
    penalties = Source("v1/sample/ops/penalties.py")
    assert penalties.parameters("apply_all_penalties") == own_parameters(sampler.apply_all_penalties)
    assert "_convert_to_tensors(output_token_ids, vocab_size" in penalties.function("apply_all_penalties")
    for module in ("v1/sample/sampler.py", "v1/sample/rejection_sampler.py"):
        assert "apply_all_penalties" in Source(module).imports()

    # Looked up in their module, by vLLM's class for it.
    drafts = Source("v1/sample/rejection_sampler.py")
    forward = drafts.function("RejectionSampler.forward")
    assert "target_logits = apply_sampling_constraints(target_logits, metadata.cu_num_draft_tokens," in forward
    assert "output_token_ids = rejection_sample(metadata.draft_token_ids, metadata.num_draft_tokens," in forward
    assert drafts.parameters("RejectionSampler.forward") == own_parameters(rejection.forward)
    for rows in ("bonus_logits = logits[bonus_logits_indices]", "raw_target_logits = logits[target_logits_indices]"):
        assert rows in forward
    constraints = drafts.parameters("apply_sampling_constraints")
    assert constraints == own_parameters(rejection.apply_sampling_constraints)
    *own, others = own_parameters(rejection.rejection_sample)
    parameters = drafts.parameters("rejection_sample")
    assert (parameters[: len(own)], others) == (own, "others")
    assert set(parameters[len(own) :]) in (set(), rejection.FLY)
    # Each is torch on whole distributions, whatever the platform.
    assert "return apply_top_k_top_p(logits, top_k, top_p)" in drafts.function("apply_sampling_constraints")
    assert "target_logits.softmax(dim=-1, dtype=torch.float32)" in drafts.function("rejection_sample")
    assert "current_platform" not in drafts.text
    # What is drawn from a request's generator, and only for drafts.
    assert "uniform_(generator=generator)" in drafts.function("generate_uniform_probs")
    assert "if num_draft_tokens[i] > 0:" in drafts.function("sample_recovered_tokens")


def test_gloo_device() -> None:
    """Torch gives each gloo group a device, and vLLM makes many groups for one rank."""
    from torch.distributed import distributed_c10d

    from vllm_arm_cpu.compat import gloo_device

    # torch 2.14 has a function for it.
    helper = getattr(distributed_c10d, "_create_gloo_process_group", distributed_c10d._new_process_group_helper)
    made = inspect.getsource(helper).partition("backend_class = ProcessGroupGloo(")[2].partition(")")[0]
    named = {line.strip().partition("=")[0] for line in made.splitlines() if "=" in line and "#" not in line}
    assert {"timeout"} <= named <= {"timeout", "enable_reconfigure"}
    assert "GroupCoordinator" in Source("distributed/parallel_state.py").function("init_model_parallel_group")
    original = distributed_c10d.ProcessGroupGloo
    with gloo_device.shared(2):
        assert distributed_c10d.ProcessGroupGloo is original
    with gloo_device.shared(1):
        assert issubclass(distributed_c10d.ProcessGroupGloo, original)
        assert distributed_c10d.ProcessGroupGloo is not original
    assert distributed_c10d.ProcessGroupGloo is original


def test_frontend_cores() -> None:
    """Clients of engines are made in every API server, and the platform hears of neither their start nor their end."""
    from vllm_arm_cpu.compat import frontend_cores

    client = Source("v1/engine/core_client.py")
    init = client.function("AsyncMPClient.__init__")
    assert "super().__init__(asyncio_mode=True" in init
    assert "self.client_count = client_count" in init
    assert client.parameters("MPClient.shutdown") == ["self", "timeout"]
    assert "current_platform" not in init + client.function("MPClient.shutdown")
    assert own_parameters(frontend_cores.shutdown)[0] == "self"


def test_torch_threads() -> None:
    """The worker reduces torch to one thread behind load_model, whatever the platform."""
    worker = Source("v1/worker/gpu_worker.py")
    assert "set_torch_threads_for_runtime" in worker.imports()
    assert "set_torch_threads_for_runtime()" in worker.function("Worker.load_model")
    helpers = Source("utils/torch_utils.py")
    function = helpers.function("set_torch_threads_for_runtime")
    assert "torch.set_num_threads(1)" in function
    assert "current_platform" not in function, "it asks the platform now"
    # Others in vLLM set numbers of their own, too.
    assert "torch.set_num_threads(num_threads)" in helpers.function("set_default_torch_num_threads")


def test_triton_kernels() -> None:
    """Without Triton, vLLM maps the slot mapping kernel to ``vllm._C``; with it, to a Triton kernel."""
    from vllm_arm_cpu.compat import triton_kernels

    cpu = Source("utils/cpu_triton_utils.py")
    name = "_compute_slot_mapping_kernel_impl"
    assert "torch.ops._C.compute_slot_mapping_kernel_impl(" in cpu.function(name)
    assert cpu.parameters(name) == own_parameters(triton_kernels.compute_slot_mapping)
    # vLLM looks the function up in its module when it registers, and registers it under this name.
    overrides = Source("platforms/cpu.py").function("CpuPlatform.register_triton_kernel_overrides")
    assert re.search(r"if HAS_TRITON:\s+return", overrides)
    registered = f"'vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel': cpu_tl.{name}"
    assert registered in overrides
    assert triton_kernels._NAME == "vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel"
    assert "_registry[name] = (original, impl)" in Source("triton_utils/dispatcher.py").function("register_kernels")
    kernel = Source("v1/worker/block_table.py").parameters("ComputeSlotMappingKernel.kernel")
    assert [parameter.removesuffix("_ptr") for parameter in kernel] == cpu.parameters(name)


def test_speculative_kernels() -> None:
    """Every kernel's stand-in calls ``vllm._C``, is registered under its name, and has our parameters."""
    from vllm_arm_cpu.compat import speculative_kernels

    cpu = Source("utils/cpu_triton_utils.py")
    overrides = Source("platforms/cpu.py").function("CpuPlatform.register_triton_kernel_overrides")
    for name, function in speculative_kernels.KERNELS.items():
        assert f"torch.ops._C.{name.lstrip('_')}(" in cpu.function(name), name
        assert cpu.parameters(name) == own_parameters(function), name
        assert f"cpu_tl.{name}" in overrides, name


def test_draft_tables() -> None:
    """vLLM compares ``weight`` of the two models' layers, and of packed ones it sees nothing."""
    import torch
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    from vllm_arm_cpu.compat import draft_tables
    from vllm_arm_cpu.layers.linear_candidates import PackedLinear

    source = Source("v1/spec_decode/llm_base_proposer.py")
    for name, layer, own in (
        ("_maybe_share_embeddings", "embed_tokens", draft_tables.share_embeddings),
        ("_maybe_share_lm_head", "lm_head", draft_tables.share_lm_head),
    ):
        method = source.function(f"SpecDecodeBaseProposer.{name}")
        assert re.search(
            rf"torch\.equal\(\w+(\.lm_head)?\.weight\.cpu\(\), self\.model\.\S*{layer}\.weight\.cpu", method
        )
        assert source.parameters(f"SpecDecodeBaseProposer.{name}") == own_parameters(own)

    def head(seed: int, rows: int, hidden: bool = True) -> Any:
        made: Any = torch.nn.Module()
        weight = torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
        made.cpu_linear, made.embedding_dim = PackedLinear(weight), 32
        made.weight = torch.nn.Parameter(torch.empty(0) if hidden else weight, requires_grad=False)
        return made

    def shared(target: Any, draft: Any) -> bool:
        proposer, models = object.__new__(SpecDecodeBaseProposer), [torch.nn.Module(), torch.nn.Module()]
        for model, layer in zip(models, (target, draft), strict=True):
            model.lm_head = layer
        proposer.model, proposer.use_local_argmax_reduction = models[1], False
        models[1].has_own_lm_head, models[0].model, models[1].model = True, torch.nn.Module(), torch.nn.Module()
        proposer.vllm_config = SimpleNamespace(speculative_config=None)
        draft_tables.share_lm_head(proposer, models[0])
        assert target.weight.numel() in (0, target.cpu_linear.n * 32), "not put back"
        return models[1].lm_head is target

    assert shared(head(1, 48), head(1, 48))
    assert shared(head(1, 48, hidden=False), head(1, 48))
    assert not shared(head(1, 48), head(2, 48))
    assert not shared(head(1, 48), head(1, 40))
    unreadable = head(1, 48)
    unreadable.cpu_linear = SimpleNamespace(n=48)
    assert not shared(unreadable, head(1, 48))


def test_checkpoint_pages() -> None:
    """The default loader looks its iterator up by name, and that keeps a file mapped until its last tensor."""
    loader = Source("model_executor/model_loader/default_loader.py")
    assert "safetensors_weights_iterator" in loader.imports()
    assert "safetensors_weights_iterator(" in loader.function("DefaultModelLoader._get_weights_iterator")
    iterator = Source("model_executor/model_loader/weight_utils.py").function("safetensors_weights_iterator")
    assert "with safe_open(" in iterator
    assert "get_tensor(" in iterator
    assert "madvise" not in iterator


def test_awq_layout() -> None:
    """vLLM's AWQ converts a layer before its kernel is asked, through a function that it looks up by name."""
    awq = Source("model_executor/layers/quantization/auto_awq.py")
    caller = awq.function("AutoAWQMarlinLinearMethod.process_weights_after_loading")
    assert re.search(r"_convert_awq_to_standard_format\(.*\)\s+self\.kernel\.process_weights_after_loading", caller)
    convert = "_convert_awq_to_standard_format"
    from vllm_arm_cpu.compat import awq_layout

    assert awq.parameters(convert) == own_parameters(awq_layout.convert)
    # The whole layer as eight times as many int32.
    assert "unpacked = qw.unsqueeze(-1) >> shifts & mask" in awq.function(convert)


def test_int4_parameters() -> None:
    """compressed-tensors' W4A8 has one parameter of int8 under two names."""
    scheme = Source("model_executor/layers/quantization/compressed_tensors/schemes/compressed_tensors_w4a8_int.py")
    create = scheme.function("CompressedTensorsW4A8Int.create_weights")
    assert "input_size_per_partition, dtype=torch.int8)" in create
    assert "layer.register_parameter('weight', weight)" in create
    assert "layer.register_parameter('weight_packed', weight)" in create
    chooser = Source("model_executor/layers/quantization/compressed_tensors/compressed_tensors.py")
    assert "CompressedTensorsW4A8Int" in chooser.imports()
    assert "CompressedTensorsW4A8Int(" in chooser.function("CompressedTensorsConfig._get_scheme_from_parts")
    # These ask the parameter how to load, others do not.
    layers = Source("model_executor/layers/linear.py")
    for method in ("ColumnParallelLinear", "MergedColumnParallelLinear", "QKVParallelLinear", "RowParallelLinear"):
        assert re.search(r"param\.load_\w+_weight\(", layers.function(f"{method}.weight_loader_v2")), method


def test_moe_methods() -> None:
    """The classes for experts are imported when a layer is made, and choose their kernel among vLLM's own."""
    folder = "model_executor/layers/quantization/compressed_tensors/compressed_tensors_moe"
    choose = Source(f"{folder}/compressed_tensors_moe.py").function("CompressedTensorsMoEMethod.get_moe_method")
    for name, scheme, select in (
        ("CompressedTensorsW8A8Int8MoEMethod", "w8a8_int8", "select_int8_moe_backend"),
        ("CompressedTensorsW4A8Int8MoEMethod", "w4a8_int8", "select_w4a8_int8_moe_backend"),
        ("CompressedTensorsWNA16MoEMethod", "wna16", "select_wna16_moe_backend"),
    ):
        module = f"compressed_tensors_moe_{scheme}"
        assert re.search(rf"from \.{module} import \(?\s*{name}\b", choose)
        assert f"return {name}(" in choose
        method = Source(f"{folder}/{module}.py")
        assert f"{select}(" in method.function(f"{name}.__init__")
        expected = ["self", "layer", "x", "topk_weights", "topk_ids", "shared_experts", "shared_experts_input"]
        assert method.parameters(f"{name}.apply") == expected
    mxfp4 = Source("model_executor/layers/quantization/mxfp4.py")
    assert "return GptOssMxfp4MoEMethod(moe)" in mxfp4.function("GptOssMxfp4Config._make_moe_method")
    assert "select_mxfp4_moe_backend(moe)" in mxfp4.function("GptOssMxfp4MoEMethod.__init__")
    assert mxfp4.parameters("GptOssMxfp4MoEMethod.apply") == expected
    oracle = Source("model_executor/layers/fused_moe/oracle/int8.py")
    assert "current_platform" not in oracle.function("_get_priority_backends"), "it asks the platform: is that a hook?"


def test_engine_death() -> None:
    """A server stops when its engine is gone, and nobody is told with what status it should end."""
    from vllm_arm_cpu.compat import engine_death

    launcher = Source("entrypoints/launchers/launcher.py")
    watch = launcher.function("watchdog_loop")
    assert "terminate_if_errored(server, engine)" in watch and "asyncio.sleep(VLLM_WATCHDOG_TIME_S)" in watch
    assert launcher.parameters("watchdog_loop") == own_parameters(engine_death.watchdog_loop)
    # What receives tokens ends with the engine, and says so.
    assert "self.output_handler = asyncio.create_task(" in Source("v1/engine/async_llm.py").function(
        "AsyncLLM._run_output_handler"
    )
    check = launcher.function("terminate_if_errored")
    assert "server.should_exit = True" in check and "exit(" not in check.replace("should_exit", "")
    assert launcher.parameters("terminate_if_errored") == ["server", "engine"]
    handler = Source("entrypoints/serve/exception_handling/handlers/vllm_error.py")
    assert "terminate_if_errored" in handler.imports()
    entry = Source("entrypoints/launchers/api_server/entry.py")
    assert "serve_http" in entry.imports()
    assert "return await serve_http(" in entry.function("build_and_serve")

    # Whoever asks an engine that dies waits for ever, and the server asks before it serves.
    client = Source("v1/engine/core_client.py")
    call = client.function("AsyncMPClient._call_utility_async")
    assert call.rstrip().endswith("return await future")
    assert client.parameters("AsyncMPClient._call_utility_async") == ["self", "method", "engine"]
    assert own_parameters(engine_death.call_utility) == ["self", "method", "args", "engine"]
    receives = client.function("AsyncMPClient._ensure_output_queue_task")
    assert "resources.output_queue_task = asyncio.create_task(" in receives
    assert "utility_results" not in receives.partition("except Exception")[2], "calls of a dead engine fail now"
    ready = entry.function("build_async_engine_client_from_engine_args")
    assert "await async_llm.reset_mm_cache()" in ready


def test_engine_shutdown() -> None:
    """SIGTERM is lost while an engine loads; and only ROCm's engines get time to end before they are killed."""
    utils = Source("v1/engine/utils.py")
    assert "zmq_socket_ctx" in utils.imports()
    assert "with zmq_socket_ctx(" in utils.function("launch_core_engines")
    swallowed = r"except KeyboardInterrupt:\s+logger\.debug\(.*\)\s+finally:"
    assert re.search(swallowed, Source("utils/network_utils.py").function("zmq_socket_ctx"))

    timeout = utils.function("get_engine_process_shutdown_timeout")
    assert "if request_timeout == 0 and process_timeout == 0" in timeout
    assert "return process_timeout" in timeout
    # 0.33 also takes a variable that the user has set; the default is what it was.
    assert set(re.findall(r"current_platform\.(\w+)", timeout)) == {"is_rocm"}
    manager = utils.function("CoreEngineProcManager.shutdown")
    assert "get_engine_process_shutdown_timeout(self._request_shutdown_timeout, timeout)" in manager
    # What is replaced is looked up by its name when it is called.
    assert "shutdown" in utils.imports()
    assert "shutdown(self.processes, timeout=process_timeout)" in manager
    from vllm_arm_cpu.compat import engine_shutdown

    assert Source("v1/utils.py").parameters("shutdown") == own_parameters(engine_shutdown.shutdown)


def test_kv_cache_dtype() -> None:
    """vLLM's list of formats has no ``int8``; what is replaced is called by its name, behind the platform's hook."""
    from typing import get_args

    from vllm.config.cache import CacheDType

    from vllm_arm_cpu.compat import kv_cache_dtype

    assert not set(kv_cache_dtype.ALIASES) & set(get_args(CacheDType))
    assert set(kv_cache_dtype.ALIASES.values()) <= set(get_args(CacheDType))
    arguments = Source("engine/arg_utils.py")
    assert "resolve_kv_cache_dtype_string" in arguments.imports()
    create = arguments.function("EngineArgs.create_engine_config")
    hook, resolve, check = map(
        create.index,
        ("current_platform.pre_register_and_update()", "resolve_kv_cache_dtype_string(", "cache_dtype=resolved_cache"),
    )
    assert hook < resolve < check
    upstream = Source("utils/torch_utils.py").parameters("resolve_kv_cache_dtype_string")
    assert upstream == own_parameters(kv_cache_dtype.resolve_kv_cache_dtype_string)


def test_queue_wait() -> None:
    """Readers spin for a second, and nobody passes another time."""
    source = Source("distributed/device_communicators/shm_broadcast.py")
    assert "busy_loop_s: float=1" in ast.unparse(source._find("SpinCondition.__init__").args)
    assert "self.last_read + self.busy_loop_s" in source.function("SpinCondition.wait")
    assert not re.search(r"\bbusy_loop_s=", source.text)


@pytest.mark.parametrize("patch", PATCHES)
def test_every_patch_has_a_test_and_an_end(patch: str) -> None:
    assert f"test_{patch}" in globals(), f"vllm_arm_cpu/compat/{patch}.py has no test here"
    docstring = ast.get_docstring(ast.parse((COMPAT / f"{patch}.py").read_text())) or ""
    assert re.search(r"\bcan\s+go\s+once\b|\bhook\b", docstring, re.I), "it does not say when it can go"


@pytest.mark.parametrize("patch", PATCHES)
def test_every_replaced_name_is_checked(patch: str) -> None:
    """What a patch assigns to vLLM's or torch's modules and classes stands in its test."""
    tree = ast.parse((COMPAT / f"{patch}.py").read_text())
    foreign = {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
        if (getattr(node, "module", None) or alias.name).partition(".")[0] in ("vllm", "torch")
    }
    replaced = {
        target.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Attribute) and ast.unparse(target).partition(".")[0] in foreign
    }
    # Several at once: the test goes through the patch's own table.
    tables = {
        ast.unparse(node.iter).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.For) and re.search(rf"setattr\(({'|'.join(foreign)})\b", ast.unparse(node))
    }
    assert replaced | tables, f"{patch} replaces nothing"
    test = inspect.getsource(globals()[f"test_{patch}"])
    assert {name for name in replaced | tables if name not in test} == set()


def test_every_patch_is_documented() -> None:
    table = (Path(__file__).parents[2] / "docs" / "maintaining.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", table, re.M) == PATCHES


def test_every_test_has_a_patch() -> None:
    tests = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {name for name in tests if not name.startswith("every_")} == set(PATCHES)


def test_every_patch_is_a_module() -> None:
    """They import beside this vLLM."""
    from importlib import import_module

    assert all(isinstance(import_module(f"vllm_arm_cpu.compat.{patch}"), ModuleType) for patch in PATCHES)

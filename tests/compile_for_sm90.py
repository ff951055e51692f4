"""Compile kernels for an H200 without one, and say what the compiler made of them.

Run as a program: `python compile_for_sm90.py '<json list of cases>'` prints one JSON object a case.
It is a program of its own because kernels compile only where Triton was imported without its
interpreter.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from sass import loads_before_stores, local_accesses_in_product_loops
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pagedattn.backends.triton.arguments import (
    PLAN_BLOCK,
    PLAN_WARPS,
    kernel_constants,
    tile_constants,
)
from pagedattn.backends.triton.tiles import (
    DeviceFacts,
    choose_hopper_tiles,
    choose_tiles,
)
from pagedattn.kernels import gluon_names
from pagedattn.kernels.ingest import ingest_table
from pagedattn.kernels.long import long_attention
from pagedattn.kernels.plan import build_schedule
from pagedattn.kernels.short import short_attention
from pagedattn.spec import AttentionSpec

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# pointers to the spec's dtype
VALUES = {"Q", "K", "V", "OUT", "KEY", "VALUE", "PAGES", "k_pages", "v_pages"}
FLOATS = {"LSE", "PIECE_ACC", "PIECE_ML"}


def cuobjdump() -> str:
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")


def announcements(ptx: str) -> list[list[str]]:
    """What follows each wait for copies, up to the arrival that tells another partition of them."""
    steps = re.findall(
        r"cp\.async\.(wait)_group|(bar)\.sync|(fence)\.proxy\.async|mbarrier\.(arrive)|"
        r"(cp\.async\.cg)", ptx
    )  # fmt: skip
    names = ["".join(step) for step in steps]
    found = []
    for at, name in enumerate(names):
        if name == "wait" and "arrive" in names[at:]:
            found.append(names[at + 1 : names.index("arrive", at) + 1])
    return found


def pipelined_loop(ttgir: str) -> str:
    """The body of the first loop that the compiler gave stages; empty where there is none."""
    lines = ttgir.splitlines()
    for end, line in enumerate(lines):
        if "} {tt.num_stages" in line:
            indent = line[: line.index("}")]
            begins = [i for i in range(end) if re.match(rf"{indent}\S.*scf\.for ", lines[i])]
            return "\n".join(lines[begins[-1] : end])
    return ""


def signature_of(
    kernel, dtype: torch.dtype, constants: dict, map_type: str
) -> tuple[dict, list[str]]:
    """Each argument's type, and those that are multiples of 16; no map: pages are pointers."""
    signature, aligned = {}, []
    for parameter in kernel.params:
        name = parameter.name
        if name in constants:
            signature[name] = "constexpr"
        elif name in ("k_pages", "v_pages") and map_type:
            signature[name] = map_type
        elif name in VALUES:
            signature[name] = f"*{TYPES[dtype]}"
            aligned.append(name)
        elif name in FLOATS:
            signature[name] = "*fp32"
            aligned.append(name)
        elif name.isupper():
            signature[name] = "*i64" if name == "SLOTS" else "*i32"
            aligned.append(name)
        elif name in ("score_scale", "cap"):
            signature[name] = "fp32"
        else:
            signature[name] = parameter.annotation_type or "i32"
            if name.endswith("_stride"):
                aligned.append(name)
    return signature, aligned


def compile_sm90(
    kernel,
    dtype: torch.dtype,
    constants: dict,
    map_type: str = "",
    source_class=ASTSource,
    **options,
) -> dict:
    signature, aligned = signature_of(kernel, dtype, constants, map_type)
    index = kernel.arg_names.index
    source = source_class(
        kernel,
        signature,
        {(index(name),): value for name, value in constants.items()},
        {(index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, sass = [
            subprocess.run(
                [cuobjdump(), what, file.name], capture_output=True, text=True, check=True
            ).stdout
            for what in ("-res-usage", "-sass")
        ]
    usage = usage[usage.index("Function") :]
    return {
        "ttgir": compiled.asm["ttgir"],
        "sass": sass,
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "loads_before_stores": [f"{line.address:x}" for line in loads_before_stores(sass)],
        "stack_bytes": int(re.search(r"STACK:(\d+)", usage)[1]),
        "shared_bytes": compiled.metadata.shared,
        "wgmma": compiled.asm["ptx"].count("wgmma.mma_async"),
        "mma": compiled.asm["ptx"].count("mma.sync"),
        "boxes": compiled.asm["ptx"].count("cp.async.bulk.tensor"),
        "announcements": announcements(compiled.asm["ptx"]),
        # of 16 bytes, which alone go past the first cache and 16 at a time
        "copies": len(re.findall(r"cp\.async\.cg\.shared\S* [^;]*, 0x10, ", compiled.asm["ptx"])),
        "buffers": sorted(
            int(n)
            for n in re.findall(r"local_alloc : \(\) -> !ttg.memdesc<(\d+)x", compiled.asm["ttgir"])
        ),
    }


def compile_case(case: dict) -> dict:
    """Compile one kernel as `TritonBackend` would launch it."""
    fields = dict(case["spec"])
    fields["dtype"] = getattr(torch, fields.get("dtype", "bfloat16"))
    spec = AttentionSpec(**fields)
    facts = DeviceFacts(132, compute_capability=(9, 0), missing_gluon=gluon_names.MISSING)
    if case["kernel"] == "hopper":
        return compile_hopper(spec, case, facts)
    tiles = choose_tiles(spec, facts, case.get("block_rows", 16))
    if case["kernel"] == "plan":
        invariant = case.get("batch_invariant", False)
        constants = {"BLOCK": PLAN_BLOCK, "BATCH_INVARIANT": invariant}
        return compile_sm90(build_schedule, spec.dtype, constants, num_warps=PLAN_WARPS[invariant])
    if case["kernel"] == "ingest":
        block = {"BLOCK": PLAN_BLOCK}
        return compile_sm90(ingest_table, spec.dtype, block, num_warps=PLAN_WARPS[False])
    kernel, chosen = {
        "short": (short_attention, tiles.short),
        "long": (long_attention, tiles.long),
    }[case["kernel"]]
    constants = {
        **kernel_constants(spec, case["page_size"]),
        **tile_constants(chosen),
        "WITH_LSE": case.get("with_lse", False),
    }
    if case["kernel"] == "short":
        constants["BATCH_INVARIANT"] = case.get("batch_invariant", False)
    answer = compile_sm90(kernel, spec.dtype, constants, num_warps=chosen.num_warps)
    loop = pipelined_loop(answer["ttgir"])
    answer["copies_in_flight"] = [int(n) for n in re.findall(r"async_wait .*num = (\d+)", loop)]
    return answer | {"stores_in_loop": loop.count("tt.store")}


def compile_hopper(spec: AttentionSpec, case: dict, facts: DeviceFacts) -> dict:
    """Compile the Gluon kernel as `Hopper` would launch it."""
    from triton.experimental.gluon._runtime import GluonASTSource

    from pagedattn.backends.triton.hopper import MAX_REGISTERS, NUM_WARPS, Hopper
    from pagedattn.kernels.hopper import attention_hopper

    tiles = choose_hopper_tiles(spec, case["page_size"], facts)
    launcher = Hopper(spec, case["page_size"], tiles, torch.device("cpu"))
    map_type, gather = "", case.get("gather", not tiles.has_boxes)
    if not gather:
        rows, columns = launcher.maps.box
        map_type = f"tensordesc<{TYPES[spec.dtype]}[{rows},{columns}],{launcher.maps.layout!r}>"
    answer = compile_sm90(
        attention_hopper, spec.dtype,
        {**launcher.constants, "WITH_LSE": case.get("with_lse", False), "GATHER": gather},
        map_type, GluonASTSource, num_warps=NUM_WARPS, maxnreg=MAX_REGISTERS,
    )  # fmt: skip
    answer["local_accesses_in_loops"] = local_accesses_in_product_loops(answer["sass"])
    return answer | {"hopper_tiles": (tiles.tile, tiles.num_stages)}


if __name__ == "__main__":
    for case in json.loads(sys.argv[1]):
        answer = compile_case(case)
        del answer["ttgir"], answer["sass"]
        print(json.dumps({"case": case, **answer}), flush=True)

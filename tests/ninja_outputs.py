"""What ninja and the compilers under it print when FlashInfer's kernels do not compile."""

NAME = "batch_prefill_with_kv_cache_dtype_q_bf16_head_dim_qk_128"
CACHE = f"/home/user/.cache/flashinfer/0.7.4/90a/cached_ops/{NAME}"
COMPILE = (
    "/usr/local/bin/nvcc --generate-dependencies-with-compile -MF x.cuda.o.d "
    "-D_GLIBCXX_USE_CXX11_ABI=1 -gencode=arch=compute_90a,code=sm_90a -O3 "
    f"-c {CACHE}/x.cu -o {CACHE}/x.cuda.o"
)
LINK = f"c++ {CACHE}/x.cuda.o -shared -L/usr/local/lib64 -lcudart -lcuda -o {CACHE}/{NAME}.so"
LOGGED = "2026-01-01 12:00:00,000 - INFO - core.py:635 - flashinfer.jit: Building JIT module"


def stopped(command: str, *errors: str) -> str:
    """A build whose second command fails."""
    return "\n".join(
        [
            f"{LOGGED} {NAME}; this can take several minutes on first use.",
            f"[1/11] {COMPILE}",
            f"[2/11] {command}",
            f"FAILED: {CACHE}/x",
            command,
            *errors,
            "ninja: build stopped: subcommand failed.",
            "Traceback (most recent call last):",
            '  File "/usr/lib/python3.11/flashinfer/jit/cpp_ext.py", line 371, in run_ninja',
            "    subprocess.run(",
            "subprocess.CalledProcessError: Command '['ninja', '-v']' returned non-zero exit "
            "status 1.",
            "RuntimeError: Ninja build failed.",
        ]
    )


# output, the error that must be told, a word of the hint
OUTPUTS = {
    "header": (
        stopped(
            COMPILE,
            f"In file included from {CACHE}/x.cu:1:",
            "/usr/lib/flashinfer/data/include/hopper/a.cuh:17:10: fatal error: curand_kernel.h: "
            "No such file or directory",
            "   17 | #include <curand_kernel.h>",
            "compilation terminated.",
        ),
        "a.cuh:17:10: fatal error: curand_kernel.h: No such file or directory",
        "nvidia-curand",
    ),
    "libraries": (
        stopped(
            LINK,
            "/usr/bin/ld: cannot find -lcudart: No such file or directory",
            "/usr/bin/ld: cannot find -lcuda: No such file or directory",
            "collect2: error: ld returned 1 exit status",
        ),
        "ld: cannot find -lcudart: No such file or directory",
        "CUDA_HOME",
    ),
    "driver": (
        stopped(
            LINK,
            "/usr/bin/ld: cannot find -lcuda: No such file or directory",
            "collect2: error: ld returned 1 exit status",
        ),
        "ld: cannot find -lcuda: No such file or directory",
        "driver",
    ),
    "code": (
        stopped(COMPILE, 'x.cu(1): error: identifier "g" is undefined', "  int f(){return g;}"),
        'x.cu(1): error: identifier "g" is undefined',
        "",
    ),
    "architecture": (
        stopped(COMPILE, "nvcc fatal   : Unsupported gpu architecture 'compute_90a'"),
        "nvcc fatal   : Unsupported gpu architecture 'compute_90a'",
        "toolkit",
    ),
    "memory of the front end": (
        stopped(COMPILE, "/usr/include/c++/12/bits/stl.h(191): catastrophic error: out of memory"),
        "stl.h(191): catastrophic error: out of memory",
        "--jobs 1",
    ),
    "memory of the machine": (
        stopped(COMPILE, "nvcc error   : 'cicc' died due to signal 9 (Kill signal)"),
        "nvcc error   : 'cicc' died due to signal 9 (Kill signal)",
        "--jobs 1",
    ),
    "shell": (
        stopped(COMPILE, "/bin/sh: 1: /usr/local/bin/nvcc: not found"),
        "sh: 1: nvcc: not found",
        "CUDA toolkit",
    ),
    "host compiler": (stopped(LINK, "/bin/sh: 1: c++: not found"), "sh: 1: c++: not found", "g++"),
    "disk": (
        stopped(LINK, "/usr/bin/ld: final link failed: No space left on device"),
        "ld: final link failed: No space left on device",
        "FLASHINFER_WORKSPACE_BASE",
    ),
    "no ninja": (
        "Traceback (most recent call last):\n"
        '  File "/usr/lib/python3.11/subprocess.py", line 1955, in _execute_child\n'
        "FileNotFoundError: [Errno 2] No such file or directory: 'ninja'",
        "FileNotFoundError: [Errno 2] No such file or directory: 'ninja'",
        "pip install ninja",
    ),
    "no package": (
        "Traceback (most recent call last):\nModuleNotFoundError: No module named 'einops'",
        "ModuleNotFoundError: No module named 'einops'",
        "pip install einops",
    ),
}

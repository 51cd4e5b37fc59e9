"""Which instructions a processor has, by its entry of /proc/cpuinfo."""

from easytorch.kernels.cpu import processor

CPUINFO = "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: has avx512f\nflags\t\t: fpu {}\n\nprocessor\t: 1\n"


def test_all_of_the_flags_are_needed() -> None:
    entry = CPUINFO.format("avx2 fma f16c")
    assert processor._has(entry, "avx2", "fma", "f16c")
    assert not processor._has(entry, "avx2", "avx512f")
    assert not processor._has(entry, "avx512f"), "a name is no flag"
    assert not processor._has(CPUINFO.format("avx512_vnni_other"), "avx512_vnni")
    assert not processor._has("", "avx2")


def test_the_levels_contain_one_another() -> None:
    assert processor.AVX2 >= processor.AVX512 >= processor.BYTE_DOT_PRODUCTS


def test_the_library_agrees() -> None:
    import ctypes

    import pytest

    from easytorch.kernels.cpu import library

    if (reason := library.missing()) is not None:
        pytest.skip(reason)
    level = library.LEVELS[ctypes.CDLL(str(library._loaded)).easytorch_cpu_level()]
    has = {"avx2": processor.AVX2, "avx512": processor.AVX512, "avx512_vnni": processor.BYTE_DOT_PRODUCTS}
    for name, present in has.items():
        assert present == (library.LEVELS.index(level) >= library.LEVELS.index(name))


def test_products_of_16_bits_and_amx_are_those_that_onednn_would_use() -> None:
    """AMX without AVX512_FP16, as a virtual machine may show it, is not used by oneDNN."""
    names = ("_BFLOAT16", "_FLOAT16", "_AMX")

    def has(flags: str) -> list[bool]:
        avx512 = "avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_vnni "
        return [processor._has(CPUINFO.format(avx512 + flags), *getattr(processor, name)) for name in names]

    zen4, sapphire_rapids = "avx512_bf16", "avx512_bf16 avx512_fp16 avx_vnni amx_bf16 amx_tile amx_int8"
    assert has("amx_bf16 amx_tile amx_int8") == [False, False, False]
    assert has(zen4) == [True, False, False] and has(f"{zen4} amx_bf16 amx_tile amx_int8") == [True, False, False]
    assert has("avx512_bf16 avx512_fp16 avx_vnni") == [True, True, False]
    assert has(sapphire_rapids) == [True, True, True]

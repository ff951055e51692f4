"""The check of spilled registers finds what it is for, and nothing else."""

import pytest
from sass import loads_before_stores

# a value is spilled before a loop that may be skipped, and loaded behind it
SKIPPED = """
    /*0000*/                   ISETP.GE.AND P0, PT, R2, 0x1, PT ;
    /*0010*/              {at}  {store} ;
    /*0020*/              @!P0 BRA 0x50 ;
    /*0030*/              {in}  {store} ;
    /*0040*/               @P1 BRA 0x30 ;
    /*0050*/                   {load} ;
    /*0060*/                   {use} ;
    /*0070*/                   EXIT ;
"""
STORE, OTHER = "STL.64 [R1+0x8], R4", "STL [R1+0x8], R4"
LOAD, USE = "LDL.64 R4, [R1+0x8]", "R2UR UR4, R4"
PREDICATE = "LOP3.LUT R4, R4, 0xfffffff7, RZ, 0xc0, !PT"


def code(before: str, inside: str, load: str = LOAD, use: str = USE) -> str:
    text = SKIPPED.replace("{load}", load).replace("{use}", use)
    return text.replace("{at}  {store}", before).replace("{in}  {store}", inside)


@pytest.mark.parametrize(
    ("sass", "found"),
    [
        (code(STORE, "NOP"), 0),
        (code("NOP", STORE), 1),
        (code(OTHER, STORE), 1),  # the half of it
        (code("@P2 " + STORE, STORE), 1),
        (code("BRX R2 -0x20", STORE), 1),
        (code("NOP", STORE, "LDL.LU R4, [R1+0x8]", PREDICATE), 0),
        (code("NOP", STORE, "LDL.LU R4, [R1+0x8]", "IADD3 R4, R4, R5, RZ"), 1),
    ],
)
def test_loads_that_a_way_without_the_store_reaches_are_found(sass, found):
    assert len(loads_before_stores(sass)) == found

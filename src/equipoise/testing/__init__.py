"""Checks that a method keeps the contract of methods; what `equipoise check` and the library's own tests run."""

from equipoise.testing.contract import ContractBroken as ContractBroken
from equipoise.testing.contract import Finding as Finding
from equipoise.testing.contract import check_method as check_method
from equipoise.testing.contract import examine as examine

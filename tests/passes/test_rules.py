"""Rules that users write: formats, recipes, and the nodes that they are for."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from dsmp.errors import RuleError
from dsmp.passes.rules import Rule, parse_rules

LINEAR, CONV, RELU = "a|fprop|linear|0", "a|fprop|conv|0", "a|fprop|relu|0"


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("bf16", (LINEAR, CONV, RELU)),
        ("tf32", (LINEAR, CONV)),
        ("int8", (LINEAR, CONV)),
        ("int8 row/row", (LINEAR, CONV)),
        ("fp16 tensor/tensor", (LINEAR, CONV)),
        ("int8 wide/row", (LINEAR,)),
        ("fp16 wide/none", (LINEAR,)),
        ("int4 wide/1x128", (LINEAR,)),
    ],
)
def test_a_rule_concerns_the_nodes_that_can_follow_it(text, keys):
    (rule,) = parse_rules({"a|*": text})
    assert [k for k in (LINEAR, CONV, RELU) if rule.concerns(k)] == list(keys)
    assert rule.asked == text and not any(parse_rules({"b|*": text})[0].concerns(k) for k in keys)
    assert Rule.model_validate(rule.model_dump()) == rule
    assert ("recipe" in rule.model_dump()) == (" " in text)


def test_a_recipe_fits_in_either_order_of_operands():
    rule = Rule(match="*", format="int8", recipe="wide/row")
    assert rule.fits("int8", "wide/row") and rule.fits("int8", "row/wide")
    assert not rule.fits("int8", "row") and not rule.fits("int4", "wide/row")
    assert Rule(match="*", format="int8").fits("int8", "row")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("int8 static/row", "come from calibration"),
        ("int8 mx32", "takes row/row or tensor/tensor or wide/row or dynamic/row, not 'mx32'"),
        ("bf16 row/row", "bf16 takes no recipe"),
        ("int8 blocks", "unknown scaling recipe 'blocks'|'blocks'"),
        ("int8 wide row", "unknown numeric format"),
        ("wide/row", "unknown numeric format"),
        ("", "unknown numeric format"),
    ],
)
def test_recipes_that_a_format_does_not_take(text, why):
    with pytest.raises(RuleError, match=why):
        parse_rules({"*": text})


def test_a_recipe_is_given_once():
    assert Rule(match="*", format="int8", recipe=None).recipe is None
    with pytest.raises(ValidationError, match="unknown numeric format"):
        Rule.model_validate({"match": "*", "format": "int8 wide/row", "recipe": "wide/row"})

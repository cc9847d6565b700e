"""Which kinds race: those that can be built for the target, and that the engine serves where one is named.

It is found out before anything takes time, so that no training ends in a drafter that cannot be served.
"""

from draftsmith.data.progress import notice
from draftsmith.models import Drafter, Target
from draftsmith.models.errors import UserError, errors_of
from draftsmith.recipes.auto.budget import recipe_of_auto, target_is_small
from draftsmith.recipes.configs.training_settings import AutoSettings
from draftsmith.recipes.engine_rules.loader_rules import is_served, why_unserved
from draftsmith.recipes.quickstart.budget import new_drafter
from draftsmith.recipes.serving.export import why_not_served


def served_kinds(settings: AutoSettings) -> list[str]:
    """Return the kinds that race, whatever the target is.

    Raises `UserError` where the engine serves none of them, and for sizes that a kind does not have.
    """
    engine, kinds = settings.engine, settings.kinds
    for kind in kinds:
        recipe_of_auto(kind, small=True)
    if engine is None:
        return kinds
    if not (served := [kind for kind in kinds if is_served(settings.family_of(kind), engine)]):
        reason = why_unserved(engine, settings.family_of(kinds[0]))
        raise UserError(
            f"--engine {engine} serves none of --drafters {settings.drafters}: {reason}; name "
            "other kinds, such as eagle3 or draft_model, or leave --engine out"
        )
    return served


def new_contenders(kinds: list[str], target: Target, engine: str | None) -> dict[str, Drafter]:
    """Return a new drafter of each kind, without those that the engine would not serve for this target.

    Raises `UserError` where a kind cannot be built for the target, and where no kind is left.
    """
    drafters, refusals = {}, {}
    for kind in kinds:
        with errors_of(f"--drafters: leave out {kind}, which cannot be trained for {target.name}"):
            drafters[kind] = new_drafter(recipe_of_auto(kind, target_is_small(target)), target)
        if engine and (reason := why_not_served(drafters[kind], engine)):
            refusals[kind] = reason
    served = {kind: drafter for kind, drafter in drafters.items() if kind not in refusals}
    if not served:
        kind, reason = next(iter(refusals.items()))
        raise UserError(
            f"--engine {engine} would serve none of --drafters {','.join(kinds)} for {target.name}: of {kind}, "
            f"{reason}; name other kinds, or leave --engine out"
        )
    for kind, reason in refusals.items():
        notice(f"{kind} does not race: {reason}")
    return served

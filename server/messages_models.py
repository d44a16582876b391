"""`GET /v1/models` for Anthropic's clients, which say who they are by a header of theirs. Pure."""

from datetime import UTC, datetime

from server.schemas import ModelBody
from server.schemas_messages import MessagesModel, MessagesModelList

VERSION_HEADER = "anthropic-version"


def model_info(model: ModelBody) -> MessagesModel:
    """One model in Anthropic's words."""
    created = datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z")
    return MessagesModel(model.id, model.id, created)


def model_list(models: list[ModelBody]) -> MessagesModelList:
    """All models, on one page."""
    data = [model_info(model) for model in models]
    return MessagesModelList(data, data[0].id if data else None, data[-1].id if data else None)

"""Build the protobuf classes of Tinker's API from a table of field numbers; `google.protobuf` alone is needed.

The classes live in a descriptor pool of their own, so that they meet no others of the same name.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "coati_tinker"
# Message -> "number type name" of its fields; `*` repeated, `?` optional with presence, `map<T>` with text as keys.
_TABLE = {
    "SparseCsr": "1 bytes values|2 bytes crow_indices|3 bytes col_indices",
    "Tensor": "1 ?bytes dense|2 ?SparseCsr sparse_csr|3 int32 dtype|4 *int64 shape",
    "BatchedTensor": "1 bytes data|2 bytes offsets|3 int32 dtype|4 *int64 trailing_shape",
    "ArrayRecord": "1 string type_tag|2 map<BatchedTensor> fields|3 int64 num_datums",
    "ForwardBackwardOutput": "1 string loss_fn_output_type|2 *ArrayRecord loss_fn_outputs|3 map<double> metrics",
    "LossConfigValue": "1 ?double number|2 ?string text",
    "EncodedTextChunk": "1 bytes tokens",
    "ImageChunk": "1 bytes data|2 string format",
    "DmelChunk": "1 bytes dmel",
    "Chunk": "1 ?EncodedTextChunk encoded_text|2 ?ImageChunk image|3 ?DmelChunk dmel",
    "Datum": "1 *Chunk model_input|2 map<Tensor> loss_fn_inputs",
    "ForwardBackwardRequest": "1 string model_id|2 int32 seq_id|3 *Datum data|4 string loss_fn|"
    "5 map<float> loss_fn_config|6 bool forward_only|7 map<LossConfigValue> loss_fn_config_v2",
    "TopkLogprobs": "1 bytes token_ids|2 bytes logprobs|3 uint32 k|4 uint32 length",
    "SampledSequence": "1 int32 stop_reason|2 bytes tokens|3 ?bytes logprobs|4 ?TopkLogprobs topk_sampled_logprobs",
    "SampleResponse": "1 *SampledSequence sequences|2 ?bytes prompt_logprobs|3 ?TopkLogprobs topk_prompt_logprobs|"
    "4 int32 prompt_cache_hit_tokens|5 ?Tensor target_prompt_logprobs",
}
_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bytes": _Field.TYPE_BYTES,
    "string": _Field.TYPE_STRING,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "uint32": _Field.TYPE_UINT32,
    "double": _Field.TYPE_DOUBLE,
    "float": _Field.TYPE_FLOAT,
    "bool": _Field.TYPE_BOOL,
}


def _build() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name=f"{_PACKAGE}.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _TABLE.items():
        message = file.message_type.add(name=name)
        for line in fields.split("|"):
            _add_field(message, *line.split())
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _TABLE}


def _add_field(message: Any, number: str, kind: str, label: str) -> None:
    field = message.field.add(name=label, number=int(number), label=_Field.LABEL_OPTIONAL)
    if kind.startswith("map<"):
        entry = message.nested_type.add(name=label.title().replace("_", "") + "Entry")
        entry.options.map_entry = True
        _set_type(entry.field.add(name="key", number=1, label=_Field.LABEL_OPTIONAL), "string")
        _set_type(entry.field.add(name="value", number=2, label=_Field.LABEL_OPTIONAL), kind[len("map<") : -1])
        field.label, field.type = _Field.LABEL_REPEATED, _Field.TYPE_MESSAGE
        field.type_name = f".{_PACKAGE}.{message.name}.{entry.name}"
        return
    if kind.startswith("*"):
        field.label = _Field.LABEL_REPEATED
    elif kind.startswith("?"):
        field.proto3_optional, field.oneof_index = True, len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{label}")
    _set_type(field, kind.lstrip("*?"))


def _set_type(field: Any, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"


MESSAGES = _build()

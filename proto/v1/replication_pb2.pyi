from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Held(_message.Message):
    __slots__ = ("name", "digest", "size_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    size_bytes: int
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("node", "incarnation", "store_id", "replicas", "version", "key_groups", "process")
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    KEY_GROUPS_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    node: str
    incarnation: str
    store_id: str
    replicas: int
    version: int
    key_groups: int
    process: str
    def __init__(self, node: _Optional[str] = ..., incarnation: _Optional[str] = ..., store_id: _Optional[str] = ..., replicas: _Optional[int] = ..., version: _Optional[int] = ..., key_groups: _Optional[int] = ..., process: _Optional[str] = ...) -> None: ...

class Inventory(_message.Message):
    __slots__ = ("seq", "held", "last", "groups")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    seq: int
    held: _containers.RepeatedCompositeFieldContainer[Held]
    last: bool
    groups: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, seq: _Optional[int] = ..., held: _Optional[_Iterable[_Union[Held, _Mapping]]] = ..., last: _Optional[bool] = ..., groups: _Optional[_Iterable[str]] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("name", "root")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    name: str
    root: str
    def __init__(self, name: _Optional[str] = ..., root: _Optional[str] = ...) -> None: ...

class Summary(_message.Message):
    __slots__ = ("seq", "groups", "last")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    seq: int
    groups: _containers.RepeatedCompositeFieldContainer[Group]
    last: bool
    def __init__(self, seq: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[Group, _Mapping]]] = ..., last: _Optional[bool] = ...) -> None: ...

class Change(_message.Message):
    __slots__ = ("seq", "added", "gone")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    seq: int
    added: _containers.RepeatedCompositeFieldContainer[Held]
    gone: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, seq: _Optional[int] = ..., added: _Optional[_Iterable[_Union[Held, _Mapping]]] = ..., gone: _Optional[_Iterable[str]] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ("seq", "root", "safe")
    class SafeEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SEQ_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    SAFE_FIELD_NUMBER: _ClassVar[int]
    seq: int
    root: str
    safe: _containers.ScalarMap[str, int]
    def __init__(self, seq: _Optional[int] = ..., root: _Optional[str] = ..., safe: _Optional[_Mapping[str, int]] = ...) -> None: ...

class AskInventory(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, groups: _Optional[_Iterable[str]] = ...) -> None: ...

class Want(_message.Message):
    __slots__ = ("files", "offsets")
    FILES_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedCompositeFieldContainer[Held]
    offsets: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, files: _Optional[_Iterable[_Union[Held, _Mapping]]] = ..., offsets: _Optional[_Iterable[int]] = ...) -> None: ...

class NotThere(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("name", "digest", "offset", "size_bytes", "data", "zstd")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    ZSTD_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    offset: int
    size_bytes: int
    data: bytes
    zstd: bool
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., offset: _Optional[int] = ..., size_bytes: _Optional[int] = ..., data: _Optional[bytes] = ..., zstd: _Optional[bool] = ...) -> None: ...

class Dictionary(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("hello", "inventory", "change", "beat", "ask_inventory", "want", "not_there", "chunk", "summary", "dictionary")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    INVENTORY_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    ASK_INVENTORY_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    NOT_THERE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    DICTIONARY_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    inventory: Inventory
    change: Change
    beat: Beat
    ask_inventory: AskInventory
    want: Want
    not_there: NotThere
    chunk: Chunk
    summary: Summary
    dictionary: Dictionary
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., inventory: _Optional[_Union[Inventory, _Mapping]] = ..., change: _Optional[_Union[Change, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., ask_inventory: _Optional[_Union[AskInventory, _Mapping]] = ..., want: _Optional[_Union[Want, _Mapping]] = ..., not_there: _Optional[_Union[NotThere, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., summary: _Optional[_Union[Summary, _Mapping]] = ..., dictionary: _Optional[_Union[Dictionary, _Mapping]] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("branch", "lag")
    BRANCH_FIELD_NUMBER: _ClassVar[int]
    LAG_FIELD_NUMBER: _ClassVar[int]
    branch: str
    lag: bool
    def __init__(self, branch: _Optional[str] = ..., lag: _Optional[bool] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("node", "incarnation", "store_id", "key_groups", "replicas", "safe_point", "last_sealed", "since", "peers", "problems", "stages", "lag_s", "backlog_bytes", "loaded", "data")
    class ProblemsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_GROUPS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    SAFE_POINT_FIELD_NUMBER: _ClassVar[int]
    LAST_SEALED_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    LAG_S_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    node: str
    incarnation: str
    store_id: str
    key_groups: int
    replicas: int
    safe_point: int
    last_sealed: int
    since: int
    peers: _containers.RepeatedCompositeFieldContainer[PeerStatus]
    problems: _containers.ScalarMap[str, str]
    stages: _containers.RepeatedCompositeFieldContainer[StageProgress]
    lag_s: float
    backlog_bytes: int
    loaded: bool
    data: str
    def __init__(self, node: _Optional[str] = ..., incarnation: _Optional[str] = ..., store_id: _Optional[str] = ..., key_groups: _Optional[int] = ..., replicas: _Optional[int] = ..., safe_point: _Optional[int] = ..., last_sealed: _Optional[int] = ..., since: _Optional[int] = ..., peers: _Optional[_Iterable[_Union[PeerStatus, _Mapping]]] = ..., problems: _Optional[_Mapping[str, str]] = ..., stages: _Optional[_Iterable[_Union[StageProgress, _Mapping]]] = ..., lag_s: _Optional[float] = ..., backlog_bytes: _Optional[int] = ..., loaded: _Optional[bool] = ..., data: _Optional[str] = ...) -> None: ...

class StageProgress(_message.Message):
    __slots__ = ("stage", "complete", "durable", "replicated", "waiting_layers", "waiting_bytes")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    REPLICATED_FIELD_NUMBER: _ClassVar[int]
    WAITING_LAYERS_FIELD_NUMBER: _ClassVar[int]
    WAITING_BYTES_FIELD_NUMBER: _ClassVar[int]
    stage: str
    complete: int
    durable: int
    replicated: int
    waiting_layers: int
    waiting_bytes: int
    def __init__(self, stage: _Optional[str] = ..., complete: _Optional[int] = ..., durable: _Optional[int] = ..., replicated: _Optional[int] = ..., waiting_layers: _Optional[int] = ..., waiting_bytes: _Optional[int] = ...) -> None: ...

class PeerStatus(_message.Message):
    __slots__ = ("node", "address", "state", "incarnation", "behind_files", "behind_bytes", "silent_s", "why")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BEHIND_FILES_FIELD_NUMBER: _ClassVar[int]
    BEHIND_BYTES_FIELD_NUMBER: _ClassVar[int]
    SILENT_S_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    node: str
    address: str
    state: str
    incarnation: str
    behind_files: int
    behind_bytes: int
    silent_s: float
    why: str
    def __init__(self, node: _Optional[str] = ..., address: _Optional[str] = ..., state: _Optional[str] = ..., incarnation: _Optional[str] = ..., behind_files: _Optional[int] = ..., behind_bytes: _Optional[int] = ..., silent_s: _Optional[float] = ..., why: _Optional[str] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("patience_s",)
    PATIENCE_S_FIELD_NUMBER: _ClassVar[int]
    patience_s: float
    def __init__(self, patience_s: _Optional[float] = ...) -> None: ...

class AttachReply(_message.Message):
    __slots__ = ("replicas", "filled", "store_id", "node", "notices")
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    FILLED_FIELD_NUMBER: _ClassVar[int]
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    NOTICES_FIELD_NUMBER: _ClassVar[int]
    replicas: int
    filled: bool
    store_id: str
    node: str
    notices: bool
    def __init__(self, replicas: _Optional[int] = ..., filled: _Optional[bool] = ..., store_id: _Optional[str] = ..., node: _Optional[str] = ..., notices: _Optional[bool] = ...) -> None: ...

class KeepRequest(_message.Message):
    __slots__ = ("traces",)
    TRACES_FIELD_NUMBER: _ClassVar[int]
    traces: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, traces: _Optional[_Iterable[str]] = ...) -> None: ...

class KeepReply(_message.Message):
    __slots__ = ("peers",)
    PEERS_FIELD_NUMBER: _ClassVar[int]
    peers: int
    def __init__(self, peers: _Optional[int] = ...) -> None: ...

class NoteRequest(_message.Message):
    __slots__ = ("layers",)
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, layers: _Optional[_Iterable[str]] = ...) -> None: ...

class SyncRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckReply(_message.Message):
    __slots__ = ("errors",)
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    errors: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, errors: _Optional[_Iterable[str]] = ...) -> None: ...

class CompactRequest(_message.Message):
    __slots__ = ("stage",)
    STAGE_FIELD_NUMBER: _ClassVar[int]
    stage: str
    def __init__(self, stage: _Optional[str] = ...) -> None: ...

class CompactProgress(_message.Message):
    __slots__ = ("merges",)
    MERGES_FIELD_NUMBER: _ClassVar[int]
    merges: int
    def __init__(self, merges: _Optional[int] = ...) -> None: ...

class FetchRoundsRequest(_message.Message):
    __slots__ = ("traces", "t")
    TRACES_FIELD_NUMBER: _ClassVar[int]
    T_FIELD_NUMBER: _ClassVar[int]
    traces: _containers.RepeatedScalarFieldContainer[str]
    t: int
    def __init__(self, traces: _Optional[_Iterable[str]] = ..., t: _Optional[int] = ...) -> None: ...

class DropRoundsRequest(_message.Message):
    __slots__ = ("stage", "t", "everywhere", "at_once")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    T_FIELD_NUMBER: _ClassVar[int]
    EVERYWHERE_FIELD_NUMBER: _ClassVar[int]
    AT_ONCE_FIELD_NUMBER: _ClassVar[int]
    stage: str
    t: int
    everywhere: bool
    at_once: bool
    def __init__(self, stage: _Optional[str] = ..., t: _Optional[int] = ..., everywhere: _Optional[bool] = ..., at_once: _Optional[bool] = ...) -> None: ...

class ChangeMembersRequest(_message.Message):
    __slots__ = ("add", "remove")
    class AddEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ADD_FIELD_NUMBER: _ClassVar[int]
    REMOVE_FIELD_NUMBER: _ClassVar[int]
    add: _containers.ScalarMap[str, str]
    remove: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, add: _Optional[_Mapping[str, str]] = ..., remove: _Optional[_Iterable[str]] = ...) -> None: ...

class ChangeBranchesRequest(_message.Message):
    __slots__ = ("create", "promote", "delete", "rewind")
    class Create(_message.Message):
        __slots__ = ("name", "parent", "at", "changed", "anew", "replaced")
        NAME_FIELD_NUMBER: _ClassVar[int]
        PARENT_FIELD_NUMBER: _ClassVar[int]
        AT_FIELD_NUMBER: _ClassVar[int]
        CHANGED_FIELD_NUMBER: _ClassVar[int]
        ANEW_FIELD_NUMBER: _ClassVar[int]
        REPLACED_FIELD_NUMBER: _ClassVar[int]
        name: str
        parent: str
        at: int
        changed: _containers.RepeatedScalarFieldContainer[str]
        anew: _containers.RepeatedScalarFieldContainer[str]
        replaced: _containers.RepeatedScalarFieldContainer[str]
        def __init__(self, name: _Optional[str] = ..., parent: _Optional[str] = ..., at: _Optional[int] = ..., changed: _Optional[_Iterable[str]] = ..., anew: _Optional[_Iterable[str]] = ..., replaced: _Optional[_Iterable[str]] = ...) -> None: ...
    class Promote(_message.Message):
        __slots__ = ("name", "keep_as")
        NAME_FIELD_NUMBER: _ClassVar[int]
        KEEP_AS_FIELD_NUMBER: _ClassVar[int]
        name: str
        keep_as: str
        def __init__(self, name: _Optional[str] = ..., keep_as: _Optional[str] = ...) -> None: ...
    class Rewind(_message.Message):
        __slots__ = ("at", "keep_as")
        AT_FIELD_NUMBER: _ClassVar[int]
        KEEP_AS_FIELD_NUMBER: _ClassVar[int]
        at: int
        keep_as: str
        def __init__(self, at: _Optional[int] = ..., keep_as: _Optional[str] = ...) -> None: ...
    CREATE_FIELD_NUMBER: _ClassVar[int]
    PROMOTE_FIELD_NUMBER: _ClassVar[int]
    DELETE_FIELD_NUMBER: _ClassVar[int]
    REWIND_FIELD_NUMBER: _ClassVar[int]
    create: ChangeBranchesRequest.Create
    promote: ChangeBranchesRequest.Promote
    delete: str
    rewind: ChangeBranchesRequest.Rewind
    def __init__(self, create: _Optional[_Union[ChangeBranchesRequest.Create, _Mapping]] = ..., promote: _Optional[_Union[ChangeBranchesRequest.Promote, _Mapping]] = ..., delete: _Optional[str] = ..., rewind: _Optional[_Union[ChangeBranchesRequest.Rewind, _Mapping]] = ...) -> None: ...

class ChangeBranchesReply(_message.Message):
    __slots__ = ("layers_dropped",)
    LAYERS_DROPPED_FIELD_NUMBER: _ClassVar[int]
    layers_dropped: int
    def __init__(self, layers_dropped: _Optional[int] = ...) -> None: ...

class ConflictsRequest(_message.Message):
    __slots__ = ("take_theirs",)
    TAKE_THEIRS_FIELD_NUMBER: _ClassVar[int]
    take_theirs: bool
    def __init__(self, take_theirs: _Optional[bool] = ...) -> None: ...

class ConflictsReply(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class CountCopiesRequest(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class CountCopiesReply(_message.Message):
    __slots__ = ("copies",)
    COPIES_FIELD_NUMBER: _ClassVar[int]
    copies: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, copies: _Optional[_Iterable[int]] = ...) -> None: ...

class FetchCheckpointRequest(_message.Message):
    __slots__ = ("checkpoint", "patience_s")
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_S_FIELD_NUMBER: _ClassVar[int]
    checkpoint: str
    patience_s: float
    def __init__(self, checkpoint: _Optional[str] = ..., patience_s: _Optional[float] = ...) -> None: ...

class FetchCheckpointReply(_message.Message):
    __slots__ = ("filled", "files")
    FILLED_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    filled: bool
    files: int
    def __init__(self, filled: _Optional[bool] = ..., files: _Optional[int] = ...) -> None: ...

class CallDoorRequest(_message.Message):
    __slots__ = ("node", "method", "path", "parameters", "body", "patience_s")
    class ParametersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NODE_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_S_FIELD_NUMBER: _ClassVar[int]
    node: str
    method: str
    path: str
    parameters: _containers.ScalarMap[str, str]
    body: bytes
    patience_s: float
    def __init__(self, node: _Optional[str] = ..., method: _Optional[str] = ..., path: _Optional[str] = ..., parameters: _Optional[_Mapping[str, str]] = ..., body: _Optional[bytes] = ..., patience_s: _Optional[float] = ...) -> None: ...

class CallDoorReply(_message.Message):
    __slots__ = ("status", "data")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    status: int
    data: bytes
    def __init__(self, status: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class ListFilesRequest(_message.Message):
    __slots__ = ("directory",)
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    directory: str
    def __init__(self, directory: _Optional[str] = ...) -> None: ...

class ListFilesReply(_message.Message):
    __slots__ = ("names", "written_ns", "digests")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_NS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    written_ns: _containers.RepeatedScalarFieldContainer[int]
    digests: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ..., written_ns: _Optional[_Iterable[int]] = ..., digests: _Optional[_Iterable[str]] = ...) -> None: ...

class FetchFilesRequest(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class LayersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Layer(_message.Message):
    __slots__ = ("stage", "fingerprint", "shard", "shards", "lower", "upper", "since", "rows", "tombstones", "bytes", "digest", "level", "tree_level", "path")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    LOWER_FIELD_NUMBER: _ClassVar[int]
    UPPER_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TOMBSTONES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    TREE_LEVEL_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    stage: str
    fingerprint: str
    shard: int
    shards: int
    lower: str
    upper: str
    since: str
    rows: int
    tombstones: int
    bytes: int
    digest: str
    level: str
    tree_level: int
    path: str
    def __init__(self, stage: _Optional[str] = ..., fingerprint: _Optional[str] = ..., shard: _Optional[int] = ..., shards: _Optional[int] = ..., lower: _Optional[str] = ..., upper: _Optional[str] = ..., since: _Optional[str] = ..., rows: _Optional[int] = ..., tombstones: _Optional[int] = ..., bytes: _Optional[int] = ..., digest: _Optional[str] = ..., level: _Optional[str] = ..., tree_level: _Optional[int] = ..., path: _Optional[str] = ...) -> None: ...

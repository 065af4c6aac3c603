"""The contract kit: what plugins are tested with, in this repository and outside it.

    fresh             run_fresh: a new interpreter that finds what the test finds
    contract          the base: contracts that cannot be silently weakened
    plugin            PluginContract      every plugin
    arch              ArchContract        model architectures
    recorded_contract RecordedContract    what they answered elsewhere
    geometry_contract GeometryContract    their published sizes
    op_layer          OpLayerContract     hardware backends and other op layers
    schedulers        SchedulerContract   schedulers
    drafter_contract  DrafterContract     drafters
    encoder_contract  EncoderContract     image encoders
    dense             a small transformer of ops only: what op layers are tested under
    toy               a whole architecture with an exact oracle (ToyLaw): the toy backend
    pictures          an image encoder of one matrix: write_picture_model
    drafters          ScriptedDrafter, a drafter that proposes what the test says
    nextn_hooks       a drafter that runs the target's MTP block
    command           run_command, a command over named modules of hooks
    gguf_factory      write_gguf, split_gguf: tiny model files; toy_vocab: vocabularies for them
    rig               ModelRig, one model driven by hand
    pipeline          make_pipeline and EngineRig, whole pipelines over named modules of hooks
    staging           executors over static buffers, at once or ahead of what was read
    server            serving, a real HTTP server over a pipeline

Import from the module that holds a name; importing this package imports nothing else.
"""

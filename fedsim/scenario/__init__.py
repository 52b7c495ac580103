# SPDX-License-Identifier: Apache-2.0
"""The scenario: one frozen object that says everything about a run, and the schema of the YAML file that it comes from.

A scenario names the data and how it is divided, the model, what the server and the clients do, who takes part, which
defence the clients use, what the server keeps of what it sees, and the seed. Nothing else decides a result.

Reading a file, overriding fields and naming the line of an error is the work of `fedsim.scenario_file`.
"""

from fedsim.scenario.active import ActiveSection, FishingServer, ImprintServer, PerClientServer, TrapServer
from fedsim.scenario.attack import (
    AttackSection,
    AutomaticAttack,
    ClosedFormAttack,
    ExactAttack,
    FedAvgAttack,
    GradientMatchingAttack,
    ImprintAttack,
    KnowledgeSection,
    LabelsAttack,
    TabularAttack,
    TextAttack,
)
from fedsim.scenario.clients import ClientSection, CohortSection, FedAvgStrategy, FedSgdStrategy, StrategySection
from fedsim.scenario.data import (
    ColumnPartition,
    CsvData,
    DataSection,
    DescriptionsData,
    DirichletPartition,
    EmbeddedData,
    HubData,
    IidPartition,
    ImageFolderData,
    NpzData,
    PartitionSection,
    QuantityPartition,
    ShardPartition,
    TextData,
)
from fedsim.scenario.defence import (
    AdaptiveClipping,
    ClientDp,
    Compression,
    DefenceSection,
    ExampleDp,
    Prune,
    Quantise,
    Sign,
)
from fedsim.scenario.model import (
    CnnModel,
    ImportedModel,
    ImprintModel,
    LogisticModel,
    MlpModel,
    ModelSection,
    ResnetModel,
    TransformerModel,
)
from fedsim.scenario.section import Section
from fedsim.scenario.whole import AdversarySection, EngineSection, Scenario

__all__ = [
    "ActiveSection",
    "AdaptiveClipping",
    "AdversarySection",
    "AttackSection",
    "AutomaticAttack",
    "ClientDp",
    "ClientSection",
    "ClosedFormAttack",
    "CnnModel",
    "CohortSection",
    "ColumnPartition",
    "Compression",
    "CsvData",
    "DataSection",
    "DefenceSection",
    "DescriptionsData",
    "DirichletPartition",
    "EmbeddedData",
    "EngineSection",
    "ExactAttack",
    "ExampleDp",
    "FedAvgAttack",
    "FedAvgStrategy",
    "FedSgdStrategy",
    "FishingServer",
    "GradientMatchingAttack",
    "HubData",
    "IidPartition",
    "ImageFolderData",
    "ImportedModel",
    "ImprintAttack",
    "ImprintModel",
    "ImprintServer",
    "KnowledgeSection",
    "LabelsAttack",
    "LogisticModel",
    "MlpModel",
    "ModelSection",
    "NpzData",
    "PartitionSection",
    "PerClientServer",
    "Prune",
    "Quantise",
    "QuantityPartition",
    "ResnetModel",
    "Scenario",
    "Section",
    "ShardPartition",
    "Sign",
    "StrategySection",
    "TabularAttack",
    "TextAttack",
    "TextData",
    "TransformerModel",
    "TrapServer",
]

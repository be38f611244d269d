"""The views of the scaling report, in the order of the page. A new view is a module and a line here."""

from __future__ import annotations

from dlbench.views.campaign_cost import CampaignCostView
from dlbench.views.causes.view import CausesView
from dlbench.views.data_path import DataPathView
from dlbench.views.differences import DifferencesView
from dlbench.views.energy import EnergyView
from dlbench.views.exchange import ExchangeView
from dlbench.views.forecast import ForecastView
from dlbench.views.history import HistoryView
from dlbench.views.layers import LayersView
from dlbench.views.memory import MemoryView
from dlbench.views.noise import NoiseView
from dlbench.views.out_of_core.view import OutOfCoreView
from dlbench.views.precision import PrecisionView
from dlbench.views.quality.view import QualityView
from dlbench.views.reading import ReadingView
from dlbench.views.runs import EnvironmentView, RunsView, WithoutFiguresView
from dlbench.views.scaling import ScalingView
from dlbench.views.shuffling import ShuffleAuditView, ShufflingView
from dlbench.views.staging import BreakEvenView, StagingView
from dlbench.views.stalls import StallsView
from dlbench.views.steps.view import RanksView, StepsView
from dlbench.views.stragglers import SlowNodesView, StragglersView
from dlbench.views.summary import SummaryView
from dlbench.views.sweep.view import SweepView
from dlbench.views.systems import SystemsView
from dlbench.views.telemetry.view import TelemetryView
from dlbench.views.time_to_train import TimeToTrainView
from dlbench.views.utilisation import UtilisationView
from dlbench.views.view import Views

SCALING = Views(
    opening=(SummaryView(), SweepView()),
    group=(
        QualityView(),
        ScalingView(),
        TimeToTrainView(),
        CausesView(),
        ForecastView(),
        StragglersView(),
        StepsView(),
        RanksView(),
        ExchangeView(),
        DataPathView(),
        StagingView(),
        ReadingView(),
        ShuffleAuditView(),
        MemoryView(),
        TelemetryView(),
        EnergyView(),
        NoiseView(),
        UtilisationView(),
    ),
    closing=(
        CampaignCostView(),
        SlowNodesView(),
        StallsView(),
        BreakEvenView(),
        ShufflingView(),
        PrecisionView(),
        OutOfCoreView(),
        DifferencesView(),
        SystemsView(),
        HistoryView(),
        LayersView(),
        RunsView(),
        WithoutFiguresView(),
        EnvironmentView(),
    ),
)
"""The views of the scaling report."""

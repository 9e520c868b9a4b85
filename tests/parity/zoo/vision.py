"""Models of images: skips that cross cuts, statistics that must count once, grouped and transposed convolutions."""

import torch
from torch import nn
from torch.nn import functional

from tests.parity.models import CNN, ViT
from tests.parity.zoo.entry import Entry, accuracy, images, smaller_images


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        skip = x if self.downsample is None else self.downsample(x)
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += skip
        return self.relu(y)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.layers = nn.Sequential(BasicBlock(8, 8, 1), BasicBlock(8, 16, 2), BasicBlock(16, 16, 1))
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.pool(self.layers(self.stem(x))).flatten(1))


class UNet(nn.Module):
    """The outer skip crosses every cut between the first block and the last."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = self.block(1, 8), self.block(8, 16)
        self.middle = self.block(16, 16)
        self.up2, self.up1 = nn.ConvTranspose2d(16, 16, 2, 2), nn.ConvTranspose2d(8, 8, 2, 2)
        self.join2, self.join1 = self.block(32, 8), self.block(16, 8)
        self.head = nn.Conv2d(8, 1, 1)

    @staticmethod
    def block(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.SiLU(inplace=True))

    def forward(self, x):
        outer = self.down1(x)
        inner = self.down2(functional.max_pool2d(outer, 2))
        x = self.middle(functional.max_pool2d(inner, 2))
        x = self.join2(torch.cat([self.up2(x), inner], dim=1))
        return self.head(self.join1(torch.cat([self.up1(x), outer], dim=1)))


def mask_loss(module, batch):
    """Which pixels are bright."""
    pixels = batch[0]
    return functional.binary_cross_entropy_with_logits(module(pixels), (pixels > 0).float())


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, 4, 1), nn.Conv2d(4, channels, 1)

    def forward(self, x):
        return x * torch.sigmoid(self.up(functional.relu(self.down(x.mean((2, 3), keepdim=True)))))


class Depthwise(nn.Module):
    """Grouped convolutions, squeeze and excite, as in MobileNet."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(1, 8, 3, padding=1)]
        for _ in range(3):
            layers += [nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8), nn.Hardswish()]
            layers += [SqueezeExcite(8), nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6(inplace=True)]
        self.layers, self.drop, self.head = nn.Sequential(*layers), nn.Dropout2d(0.1), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.drop(self.layers(x)).mean((2, 3)))


class ChannelsLast(ResNet):
    """Weights whose strides are not the usual ones."""

    def __init__(self) -> None:
        super().__init__()
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        return super().forward(x.to(memory_format=torch.channels_last))


ENTRIES = [
    Entry(
        name="cnn",
        what="BatchNorm, skips over several layers",
        model=CNN,
        samples=images,
        shorter=smaller_images,
        evaluate=accuracy,
    ),
    Entry(name="vit", what="class token, positions that every batch shares", model=ViT, samples=images),
    Entry(
        name="resnet",
        what="BasicBlock, BatchNorm, strides",
        model=ResNet,
        samples=images,
        shorter=smaller_images,
        evaluate=accuracy,
    ),
    Entry(name="resnet_channels_last", what="weights in channels_last", model=ChannelsLast, samples=images),
    Entry(name="unet", what="skips over all cuts, transposed convolutions", model=UNet, samples=images, step=mask_loss),
    Entry(
        name="depthwise_cnn",
        what="grouped convolutions, squeeze and excite",
        model=Depthwise,
        samples=images,
        shorter=smaller_images,
        evaluate=accuracy,
    ),
]

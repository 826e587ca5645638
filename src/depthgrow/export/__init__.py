"""Students as Hugging Face models. Importing this makes transformers know the model type ``depthgrow``."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from depthgrow.export.modeling_depthgrow import DepthgrowConfig, DepthgrowForCausalLM, DepthgrowModel

AutoConfig.register(DepthgrowConfig.model_type, DepthgrowConfig, exist_ok=True)
AutoModel.register(DepthgrowConfig, DepthgrowModel, exist_ok=True)
AutoModelForCausalLM.register(DepthgrowConfig, DepthgrowForCausalLM, exist_ok=True)

#include "scan.h"

#include <initializer_list>
#include <regex>
#include <vector>

namespace cuda_stand_in {

namespace {

bool has_word(const std::string& text, std::initializer_list<const char*> words) {
    for (const char* word : words)
        if (std::regex_search(text, std::regex(std::string("\\b") + word + "\\b"))) return true;
    return false;
}

// What a brace opens, by the text before it.
enum class Block { Scope, Function, Other };

Block block_of(const std::string& head) {
    const bool has_parameters = head.find('(') != std::string::npos;
    if (has_word(head, {"enum"})) return Block::Other;
    if (!has_parameters && has_word(head, {"struct", "class", "union", "namespace", "extern"}))
        return Block::Scope;
    return has_parameters && head.find('=') == std::string::npos ? Block::Function : Block::Other;
}

}  // namespace

std::string kernels_text(const std::string& preprocessed) {
    // The first argument of launch bounds may hold a pair of parentheses.
    static const std::regex kernel(
        R"(extern\s+"C"\s+__global__\s+(?:void\s+)?)"
        R"((?:__launch_bounds__\s*\(([^,()]*(?:\([^()]*\)[^,()]*)*)(?:,[^;{]*?)?\)\s*)?)"
        R"((?:void\s+)?(\w+)\s*\()");
    std::string text;
    for (std::sregex_iterator found(preprocessed.begin(), preprocessed.end(), kernel), end; found != end;
         ++found) {
        const std::string threads_max = (*found)[1].matched ? (*found)[1].str() : "1024";
        text += "CUDA_STAND_IN_KERNEL(" + (*found)[2].str() + ", (" + threads_max + "))\n";
    }
    return text;
}

std::string function_without_device(const std::string& preprocessed) {
    std::vector<Block> blocks;
    std::string head;  // since the last declaration ended
    for (const char c : preprocessed) {
        const bool is_in_scopes = blocks.empty() || blocks.back() == Block::Scope;
        if (c == '{') {
            const Block block = is_in_scopes ? block_of(head) : Block::Other;
            if (block == Block::Function && !has_word(head, {"__device__", "__global__", "constexpr"}))
                return head;
            blocks.push_back(block);
        } else if (c == '}' && !blocks.empty()) {
            blocks.pop_back();
        }
        if (c == '{' || c == '}' || (c == ';' && is_in_scopes)) head.clear();
        else if (is_in_scopes) head += c == '\n' ? ' ' : c;
    }
    return {};
}

}  // namespace cuda_stand_in

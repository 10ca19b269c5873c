// Compresses packets of float32 values to bursts: an AXI stream with eight values to a beat comes in,
// an AXI stream of bytes goes out. README.md has the layout and the meaning of m_axis_tuser.
module gw_compressor (
    input logic       clk,
    input logic       rst,
    input logic [2:0] settings,  // param_a of the codec; may change while no packet is inside

    input  logic [255:0] s_axis_tdata,
    input  logic [ 31:0] s_axis_tkeep,
    input  logic         s_axis_tlast,
    input  logic         s_axis_tvalid,
    output logic         s_axis_tready,
    output logic [255:0] m_axis_tdata,
    output logic [ 31:0] m_axis_tkeep,
    output logic         m_axis_tlast,
    output logic [  3:0] m_axis_tuser,
    output logic         m_axis_tvalid,
    input  logic         m_axis_tready
);
    wire [271:0] bytes;
    wire [5:0] available, step_raw_size, take;
    wire [3:0] step_present;
    wire ended, step_raw, step_last, step_padding, taken, finished;
    // Eight values make a burst, the packet's end fewer.
    assign step_raw      = 1'b0;
    assign step_raw_size = 6'd0;
    assign step_present  = available >= 6'd32 ? 4'd8 : {1'b0, available[4:2]};
    assign step_last     = ended && available <= 6'd32;
    assign step_padding  = 1'b0;
    gw_compression_engine engine (.*);

    wire unused = &{1'b0, bytes, taken, finished, take};
endmodule
